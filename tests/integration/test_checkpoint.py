"""Checkpoints on a real S3: what is saved is loaded; races, crashes at every step, damage, pruning, memory."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, cast

import psutil
import pyarrow as pa
import pytest

from megaflow_stream import checkpoint
from megaflow_stream.checkpoint import (
    MODEL,
    CheckpointWriter,
    Head,
    Hold,
    Loaded,
    Snapshot,
    TensorSpec,
    alias,
    hold,
    lineage,
    names,
)
from megaflow_stream.errors import Damaged, Fenced, MegaflowError, NotFound, ServiceUnreachable, SettingError
from megaflow_stream.storage.api import ObjectInfo, ObjectStore
from megaflow_stream.storage.s3 import S3Store

Tensors = Sequence[tuple[TensorSpec, memoryview]]
DAYS = 200_000  # seconds after which no killed save's mark holds anything


class Crash(Exception):
    pass


class Faulty:
    """A store whose n-th put (from 1) fails, before it is written or after."""

    def __init__(self, store: ObjectStore, nth: int, *, written: bool) -> None:
        self.store, self.nth, self.written, self.puts = store, nth, written, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def put(self, key: str, data: bytes | memoryview, **more: Any) -> ObjectInfo:
        self.puts += 1
        if self.puts != self.nth:
            return await self.store.put(key, data, **more)
        if self.written:
            await self.store.put(key, data, **more)
        raise Crash(key)


class Deaf:
    """A store whose first answer to a put of `key` is lost."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.store, self.key = store, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def put(self, key: str, data: bytes | memoryview, **more: Any) -> ObjectInfo:
        info = await self.store.put(key, data, **more)
        if key == self.key:
            self.key = ""
            raise ServiceUnreachable("away")
        return info


class Later:
    """A clock that is ahead: everything is old."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        import time

        return time.time() + self.seconds

    def monotonic(self) -> float:
        return self.now()

    async def sleep(self, seconds: float) -> None: ...


@pytest.fixture
async def store(s3: Any) -> AsyncIterator[S3Store]:
    store = S3Store(
        endpoint_url=s3.endpoint_url, bucket="test-storage", access_key=s3.access_key, secret_key=s3.secret_key
    )
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def job() -> str:
    return f"job-{secrets.token_hex(6)}"


def tensors(seed: int, *, frozen: int = 0) -> Tensors:
    """A small model: a matrix in several chunks, many small tensors, a frozen part, optimizer state."""
    specs = [TensorSpec("embedding", "float32", (700, 600), "trainable")]
    specs += [TensorSpec(f"norm.{i}", "bfloat16", (64,), "trainable") for i in range(20)]
    specs += [TensorSpec("base", "float16", (600, 1000), "frozen"), TensorSpec("empty", "int64", (0, 3), "frozen")]
    specs += [TensorSpec("optimizer/embedding/exp_avg", "float32", (700, 600), "optimizer")]
    specs += [TensorSpec("optimizer/embedding/step", "float32", (), "optimizer")]
    made = []
    for number, spec in enumerate(specs):
        source = random.Random((frozen if spec.kind == "frozen" else seed) * 1000 + number)
        made.append((spec, memoryview(bytearray(source.randbytes(spec.size_bytes)))))
    return made


def snapshot(step: int, **more: Any) -> Snapshot:
    rows = pa.table(
        {
            "conversation": [f"c{step}"],
            "topic": ["features.agent"],
            "partition": [0],
            "offset": [step],
            "step": [step],
        }
    )
    return Snapshot(
        step=step,
        tensors=more.get("tensors", tensors(step)),
        state={"offsets": {"features.agent/0": step}, "plan_cursor": step},
        lineage=rows,
    )


def writer(store: ObjectStore, job: str) -> CheckpointWriter:
    return CheckpointWriter(store, job, definition={"tokenizer": "t"}, chunk_bytes=1 << 20)


async def saved(store: ObjectStore, job: str, count: int) -> list[Head]:
    ours, heads, head = writer(store, job), [], None
    for step in range(1, count + 1):
        head = await ours.save(snapshot(step), head)
        heads.append(head)
    return heads


def same(loaded: Loaded, expected: Tensors) -> bool:
    return [(s, bytes(v)) for s, v in loaded.tensors] == [(s, bytes(v)) for s, v in expected]


async def test_what_was_saved_is_loaded(store: S3Store, job: str) -> None:
    assert await checkpoint.head(store, job) is None
    with pytest.raises(NotFound, match="no checkpoint yet"):
        await checkpoint.load(store, job)
    head = await writer(store, job).save(snapshot(3), None)
    assert await checkpoint.head(store, job) == head
    loaded = await checkpoint.load(store, job)
    assert same(loaded, tensors(3))
    assert loaded.head == head
    assert not loaded.skipped
    assert loaded.manifest.offsets == {"features.agent/0": 3}
    assert loaded.manifest.definition == {"tokenizer": "t"}
    assert [info.key async for info in store.list(f"jobs/{job}/manifests/")] == [head.manifest]


async def test_a_model_loads_without_its_optimizer(store: S3Store, job: str) -> None:
    await writer(store, job).save(snapshot(1), None)
    loaded = await checkpoint.load(store, job, kinds=MODEL)
    assert {spec.kind for spec, _ in loaded.tensors} == {"trainable", "frozen"}
    for sha256 in loaded.manifest.chunks(["optimizer"]):
        await store.delete(names.chunk(job, sha256))
    assert same(await checkpoint.load(store, job, kinds=MODEL), [t for t in tensors(1) if t[0].kind != "optimizer"])
    with pytest.raises(Damaged, match="no checkpoint of the job is whole"):
        await checkpoint.load(store, job)


async def test_only_what_changed_is_uploaded(store: S3Store, job: str) -> None:
    ours = writer(store, job)
    head = await ours.save(snapshot(1), None)
    first = ours.saved
    head = await ours.save(snapshot(2), head)
    assert ours.saved.reused_bytes == 600 * 1000 * 2
    assert ours.saved.uploaded_bytes + ours.saved.reused_bytes == first.uploaded_bytes
    again = writer(store, job)
    await again.save(snapshot(3, tensors=tensors(2)), head)
    assert again.saved.uploaded_bytes == 0
    assert same(await checkpoint.load(store, job), tensors(2))


async def test_a_head_that_was_moved_though_its_answer_was_lost_is_ones_own(store: S3Store, job: str) -> None:
    """The store is away for longer than a call is tried, right after the head was moved; then the save is repeated."""
    for parent_step, step in ((None, 1), (1, 2)):
        parent = await checkpoint.head(store, job)
        assert (parent.step if parent else None) == parent_step
        ours = writer(cast(ObjectStore, Deaf(store, names.head(job))), job)
        with pytest.raises(ServiceUnreachable):
            await ours.save(snapshot(step), parent)
        head = await ours.save(snapshot(step), parent)
        assert head == await checkpoint.head(store, job)
        assert same(await checkpoint.load(store, job), tensors(step))
        following = await ours.save(snapshot(step), head)  # and the next one builds on it
        assert following != head
        with pytest.raises(Fenced):
            await writer(store, job).save(snapshot(step), parent)
    assert [step async for step in _lineage_steps(store, job)] == [2, 2, 1, 1]


async def _lineage_steps(store: ObjectStore, job: str) -> AsyncIterator[int]:
    async for chunk in lineage.walk(store, (await checkpoint.load(store, job)).manifest):
        yield chunk.step


async def test_of_twenty_racing_writers_one_wins_and_the_others_are_fenced(store: S3Store, job: str) -> None:
    first = await writer(store, job).save(snapshot(1), None)
    small = [(TensorSpec("w", "float32", (4,), "trainable"), memoryview(bytearray(16)))]
    for parent in (first, None):
        results = await asyncio.gather(
            *(writer(store, job).save(snapshot(2, tensors=small), parent) for _ in range(20)), return_exceptions=True
        )
        heads = [result for result in results if isinstance(result, Head)]
        assert len(heads) == (1 if parent else 0)
        assert sum(isinstance(result, Fenced) for result in results) == 20 - len(heads)
        if heads:
            assert await checkpoint.head(store, job) == heads[0]


async def test_a_crash_at_any_put_leaves_the_old_head_or_the_new_one_whole(store: S3Store, job: str) -> None:
    first = await writer(store, job).save(snapshot(1), None)
    counting = Faulty(store, 0, written=False)
    probe = await writer(counting, job).save(snapshot(2), first)
    assert counting.puts > 5
    for nth in range(1, counting.puts + 1):
        for written in (False, True):
            before = await checkpoint.head(store, job)
            with pytest.raises(Crash):
                await writer(Faulty(store, nth, written=written), job).save(snapshot(100 + nth), before)
            loaded = await checkpoint.load(store, job)
            moved = nth == counting.puts and written
            assert loaded.manifest.step == (100 + nth if moved else before.step if before else 0)
            assert not loaded.skipped
    assert probe.step == 2
    # A restarted trainer goes on from the head.
    loaded = await checkpoint.load(store, job)
    await writer(store, job).save(snapshot(300), loaded.head)
    assert same(await checkpoint.load(store, job), tensors(300))


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "manifest", "manifest missing"])
async def test_damage_falls_back_one_manifest_and_is_told(store: S3Store, job: str, damage: str) -> None:
    heads = await saved(store, job, 3)
    newest = await checkpoint.read_manifest(store, heads[2].ref)
    older = await checkpoint.read_manifest(store, heads[1].ref)
    sizes = {sha256: size for sha256, size in newest.chunks().items() if sha256 not in older.chunks()}
    key = names.chunk(job, max(sizes, key=lambda sha256: sizes[sha256]))
    if damage.startswith("manifest"):
        key = heads[2].manifest
    data, _ = await store.get(key)
    if damage.endswith("missing"):
        await store.delete(key)
    elif damage == "short":
        await store.put(key, data[:-1])
    else:
        await store.put(key, data[:99] + bytes([data[99] ^ 1]) + data[100:])
    loaded = await checkpoint.load(store, job)
    assert loaded.manifest.step == 2
    assert same(loaded, tensors(2))
    assert [skipped.step for skipped in loaded.skipped] == [3]
    assert loaded.skipped[0].reason
    with pytest.raises(MegaflowError):
        await checkpoint.load(store, job, heads[2].manifest)
    assert (await checkpoint.verify(store, heads[2].ref)).problems
    assert not (await checkpoint.verify(store, heads[1].ref)).problems
    # What is saved next builds on what was loaded, and writes the damaged bytes again.
    assert loaded.head is not None
    head = await writer(store, job).save(snapshot(3), loaded.head)
    assert same(await checkpoint.load(store, job), tensors(3))
    assert not (await checkpoint.verify(store, head.ref)).problems


async def test_when_nothing_is_whole_the_error_says_so(store: S3Store, job: str) -> None:
    for head in await saved(store, job, 2):
        await store.put(head.manifest, b"{}")
    with pytest.raises(Damaged, match="2 were tried") as raised:
        await checkpoint.load(store, job)
    assert "verify" in raised.value.hint


async def test_a_checkpoint_is_found_by_key_step_alias_and_head(store: S3Store, job: str) -> None:
    heads = await saved(store, job, 3)
    best = await alias.move(store, job, "best", heads[1].ref, None, {"by": "test"})
    assert await alias.get(store, job, "best") == best
    assert await checkpoint.resolve(store, job) == heads[2].ref
    assert await checkpoint.resolve(store, job, "head") == heads[2].ref
    assert await checkpoint.resolve(store, job, "best") == heads[1].ref
    assert await checkpoint.resolve(store, job, "2") == heads[1].ref
    assert await checkpoint.resolve(store, job, 1) == heads[0].ref
    assert await checkpoint.resolve(store, job, heads[0].manifest) == heads[0].ref
    for missing in ("worst", "9", 7):
        with pytest.raises(NotFound):
            await checkpoint.resolve(store, job, missing)
    await alias.move(store, job, "best", heads[2].ref, best, {})
    with pytest.raises(Fenced):
        await alias.move(store, job, "best", heads[0].ref, best, {})
    assert [found.name async for found in alias.every(store, job)] == ["best"]


async def test_a_snapshot_that_cannot_be_resumed_is_refused(store: S3Store, job: str) -> None:
    with pytest.raises(MegaflowError, match="offsets"):
        await writer(store, job).save(Snapshot(step=1, tensors=[], state={"plan_cursor": 1}), None)
    bad = [(TensorSpec("w", "float32", (4,), "trainable"), memoryview(bytearray(15)))]
    with pytest.raises(MegaflowError, match="16 bytes, not 15"):
        await writer(store, job).save(snapshot(1, tensors=bad), None)
    assert await checkpoint.head(store, job) is None


async def test_pruning_keeps_the_head_the_newest_the_aliases_and_all_lineage(store: S3Store, job: str) -> None:
    heads = await saved(store, job, 6)
    await alias.move(store, job, "best", heads[1].ref, None, {})
    with pytest.raises(Crash):  # an orphan: chunks and a manifest that never became the head
        await writer(Faulty(store, 9, written=True), job).save(snapshot(99), heads[5])
    with pytest.raises(SettingError, match="at least 2"):
        await checkpoint.prune(store, job, 1)
    before = {info.key async for info in store.list(f"jobs/{job}/")}

    dry = await checkpoint.prune(store, job, 2, dry_run=True, clock=Later(DAYS))
    assert {info.key async for info in store.list(f"jobs/{job}/")} == before
    young = await checkpoint.prune(store, job, 2)
    assert young.manifests == [heads[i].manifest for i in (0, 2, 3)]
    assert not young.chunks
    assert young.young > 0

    real = await checkpoint.prune(store, job, 2, clock=Later(DAYS))
    after = {info.key async for info in store.list(f"jobs/{job}/")}
    assert set(dry.manifests) == set(young.manifests) | set(real.manifests)
    assert set(real.chunks) == set(dry.chunks)
    assert before - after == {*dry.manifests, *dry.chunks, *dry.lineage}
    assert dry.freed_bytes > real.freed_bytes > 0
    assert real.kept == [heads[i].manifest for i in (5, 4, 1)]
    for kept in (heads[5], heads[4], heads[1]):
        assert not (await checkpoint.verify(store, kept.ref)).problems
        assert (await checkpoint.load(store, job, kept.manifest)).manifest.step == kept.step
    newest = await checkpoint.read_manifest(store, heads[5].ref)
    steps = (await lineage.of_checkpoint(store, newest))["step"].to_pylist()
    assert steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(NotFound):
        await checkpoint.load(store, job, heads[0].manifest)
    assert not (await checkpoint.prune(store, job, 2, clock=Later(DAYS))).chunks


async def test_fifty_saves_do_not_grow_memory(store: S3Store, job: str) -> None:
    ours, head = writer(store, job), None
    state = tensors(0)
    process, marks = psutil.Process(), []
    for step in range(1, 51):
        state[0][1][:8] = step.to_bytes(8, "little")
        head = await ours.save(snapshot(step, tensors=state), head)
        if step in (15, 50):
            gc.collect()
            marks.append(process.memory_info().rss)
    assert marks[1] - marks[0] < 16 << 20
    assert ours.saved.chunks == 1


class Meanwhile:
    """A store during which something else happens once: right before a call of `method` on a key with this prefix."""

    def __init__(self, store: ObjectStore, method: str, prefix: str, then: Callable[[], Awaitable[object]]) -> None:
        self.store, self.method, self.prefix = store, method, prefix
        self.then: Callable[[], Awaitable[object]] | None = then

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)
        if name != self.method:
            return found

        async def call(key: str, *more: Any, **named: Any) -> Any:
            await self._happens(key)
            return await found(key, *more, **named)

        async def listed(key: str) -> AsyncIterator[ObjectInfo]:
            await self._happens(key)
            async for info in found(key):
                yield info

        return listed if name == "list" else call

    async def _happens(self, key: str) -> None:
        if key.startswith(self.prefix) and self.then is not None:
            then, self.then = self.then, None
            await then()


DURING_PRUNE = [("head", "saving"), ("list", "manifests/"), ("put", "pruning/"), ("list", "aliases/best")]
DURING_PRUNE += [("delete", "manifests/"), ("delete", "pruning/"), ("list", "chunks/"), ("delete", "chunks/")]
DURING_HOLD = [("put", "aliases/"), ("list", "pruning/"), ("head", "manifests/")]


@pytest.mark.parametrize(("method", "prefix"), DURING_PRUNE)
async def test_what_is_held_while_a_prune_is_under_way_stays_whole(
    store: S3Store, job: str, method: str, prefix: str
) -> None:
    heads, held = await saved(store, job, 5), []
    ours = Hold(store, job, "best.candidate")

    async def take() -> None:
        held.append(await ours.take(heads[1].ref))

    during = cast(ObjectStore, Meanwhile(store, method, f"jobs/{job}/{prefix}", take))
    if prefix == "aliases/best":  # the second look at the aliases: of one that lies there already
        await alias.move(store, job, "best", heads[4].ref, None, {})
        during = cast(ObjectStore, Meanwhile(store, "get", f"jobs/{job}/{prefix}", take))
    report = await checkpoint.prune(during, job, 2, clock=Later(1000))
    whole = not (await checkpoint.verify(store, heads[1].ref)).problems
    assert held
    assert not held[0] or whole
    if (method, prefix) in DURING_PRUNE[:2]:
        assert held[0]  # before the mark
    if held[0]:
        assert heads[1].manifest not in report.manifests
    assert heads[2].manifest in report.manifests
    assert [info.key async for info in store.list(names.pruning(job))] == []


@pytest.mark.parametrize(("method", "prefix"), DURING_HOLD)
async def test_a_prune_while_something_is_being_held_leaves_it_or_is_seen(
    store: S3Store, job: str, method: str, prefix: str
) -> None:
    heads = await saved(store, job, 5)

    async def prune() -> None:
        await checkpoint.prune(store, job, 2, clock=Later(1000))

    during = Meanwhile(store, method, f"jobs/{job}/{prefix}", prune)
    held = await Hold(cast(ObjectStore, during), job, "best.candidate").take(heads[1].ref)
    assert held == (prefix != "aliases/")
    assert held == (not (await checkpoint.verify(store, heads[1].ref)).problems)


async def test_a_hold_passes_to_the_newer_evaluator(store: S3Store, job: str) -> None:
    heads = await saved(store, job, 2)
    old, new = Hold(store, job, "best.candidate"), Hold(store, job, "best.candidate")
    await old.open()
    await new.open()
    assert await old.take(heads[0].ref)  # the first of all, after the newer one has looked
    assert await new.take(heads[1].ref)
    with pytest.raises(Fenced):
        await old.take(heads[0].ref)
    third = Hold(store, job, "best.candidate")
    await third.open()
    with pytest.raises(Fenced):
        await new.take(heads[0].ref)
    assert await third.take(heads[0].ref)


async def test_the_mark_of_a_prune_that_was_killed_goes_with_a_later_one(store: S3Store, job: str) -> None:
    heads = await saved(store, job, 4)
    await hold.mark(store, job, [heads[0].manifest])
    ours = Hold(store, job, "best.candidate")
    assert not await ours.take(heads[0].ref)
    await ours.take(heads[3].ref)
    await checkpoint.prune(store, job, 2, clock=Later(2 * hold.MARK_SECONDS))
    assert [info.key async for info in store.list(names.pruning(job))] == []


async def test_a_prune_during_a_save_takes_nothing_of_it_however_long_it_takes(store: S3Store, job: str) -> None:
    """At each place of the save everything that it has written counts as old."""
    head = (await saved(store, job, 2))[-1]
    places = [
        ("put", "chunks/"),
        ("put", "lineage/"),
        ("put", "manifests/"),
        ("put", "head.json"),
        ("delete", "saving"),
    ]
    for step, (method, prefix) in enumerate(places, 10):
        pruned: list[checkpoint.Pruned] = []

        async def prune(pruned: list[checkpoint.Pruned] = pruned) -> None:
            pruned.append(await checkpoint.prune(store, job, 2, clock=Later(10_000)))

        during = cast(ObjectStore, Meanwhile(store, method, f"jobs/{job}/{prefix}", prune))
        head = await writer(during, job).save(snapshot(step), head)
        assert pruned
        assert not (await checkpoint.verify(store, head.ref)).problems
        assert same(await checkpoint.load(store, job), tensors(step))
    assert await store.head(names.saving(job)) is None


async def test_what_a_killed_save_left_is_pruned_in_the_end(store: S3Store, job: str) -> None:
    heads = await saved(store, job, 2)
    with pytest.raises(Crash):
        await writer(Faulty(store, 5, written=True), job).save(snapshot(9), heads[-1])
    assert not (await checkpoint.prune(store, job, 2, clock=Later(10_000))).chunks
    assert (await checkpoint.prune(store, job, 2, clock=Later(100_000))).chunks
    assert same(await checkpoint.load(store, job), tensors(2))


async def test_a_head_that_an_older_trainer_is_moving_comes_too_late(store: S3Store, job: str) -> None:
    """A write in flight of a leader that was killed: it lands after the next leader has read the head."""
    first = await writer(store, job).save(snapshot(1), None)
    begun: list[Head] = []

    async def next_leader() -> None:
        await checkpoint.take_over(store, job, "the next")
        head = (await checkpoint.load(store, job)).head
        assert head is not None
        begun.append(head)

    old = writer(cast(ObjectStore, Meanwhile(store, "put", names.head(job), next_leader)), job)
    with pytest.raises(Fenced):
        await old.save(snapshot(2), first)
    assert begun[0].ref == first.ref
    new = writer(store, job)
    assert (await new.save(snapshot(2), begun[0])) == await checkpoint.head(store, job)
    # One that lands in the middle of taking over is what the next leader begins with.
    older = writer(store, job)
    parent = await checkpoint.head(store, job)

    async def lands() -> None:
        await older.save(snapshot(3), parent)

    await checkpoint.take_over(cast(ObjectStore, Meanwhile(store, "put", names.head(job), lands)), job, "another")
    loaded = await checkpoint.load(store, job)
    assert loaded.manifest.step == 3
    await writer(store, job).save(snapshot(4), loaded.head)
    await checkpoint.take_over(store, f"{job}.none", "nothing to take over")
