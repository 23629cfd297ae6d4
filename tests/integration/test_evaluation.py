"""Evaluation on a real Kafka and a real S3: losses, cuts, promotion, restarts, memory."""

from __future__ import annotations

import asyncio
import gc
import math
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megaflow_stream import faults
from megaflow_stream.bus import connect
from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.checkpoint import MODEL, CheckpointWriter, Snapshot, alias, load, prune, verify
from megaflow_stream.errors import Fenced, MegaflowError
from megaflow_stream.evaluation import DoesNotFit, Evaluator, evaluate, load_into, put_into
from megaflow_stream.evaluation.cut import take
from megaflow_stream.storage.s3 import S3Store
from megaflow_stream.training.batch import micro_batch
from megaflow_stream.training.gpt import GPT, GPTConfig, loss
from tests.integration.evaluation_case import Case, build_model, model_of, sequence, tensors_of
from tests.unit.test_stall import Fast, FirstIsSilent
from trainers.model_finetune import build_model as build_reference_model

ROOT = Path(__file__).resolve().parents[2]
ECHOES = [sequence([n % 16] * (6 + n % 9), f"c{n}") for n in range(8)]


@pytest.fixture
async def case(kafka: str, s3: Any) -> AsyncIterator[Case]:
    bus = await connect(kafka)
    store = S3Store(
        endpoint_url=s3.endpoint_url, bucket="test-storage", access_key=s3.access_key, secret_key=s3.secret_key
    )
    await store.open()
    case = Case(bus, store)
    await case.make_topics()
    yield case
    await case.close()
    await store.close()
    await bus.close()


async def test_the_loss_is_the_mean_over_tokens_whatever_the_slices(case: Case) -> None:
    await case.validate_on(*ECHOES, b"not a record")
    model = model_of(1.0)
    cut = await take(case.bus, case.trainer.validation)
    measured = await evaluate(case.bus, case.trainer, model, cut, micro_slice=3)
    total, tokens = 0.0, 0
    for one in ECHOES:
        value, count = loss(model, micro_batch([one], rows=1, block_tokens=16))
        total, tokens = total + float(value.detach()), tokens + count
    assert (measured.records, measured.bad, measured.tokens) == (8, 1, tokens)
    assert measured.loss == pytest.approx(total / tokens, rel=1e-5)
    assert measured.perplexity == pytest.approx(math.exp(total / tokens), rel=1e-4)
    again = await evaluate(case.bus, case.trainer, model, cut, micro_slice=3)
    assert again == measured
    assert not any(parameter.grad is not None for parameter in model.parameters())


async def test_records_past_the_cut_do_not_count(case: Case) -> None:
    await case.validate_on(*ECHOES[:5])
    cut = await take(case.bus, case.trainer.validation)
    before = await evaluate(case.bus, case.trainer, model_of(1.0), cut, micro_slice=3)
    await case.validate_on(*ECHOES[5:])
    assert await evaluate(case.bus, case.trainer, model_of(1.0), cut, micro_slice=3) == before
    assert before.records == 5


async def test_features_of_another_tokenizer_are_refused_by_name(case: Case) -> None:
    await case.validate_on(ECHOES[0])
    cut = await take(case.bus, case.trainer.validation)
    with pytest.raises(MegaflowError, match="of tokenizer abababababab, the checkpoint of cdcdcdcdcdcd"):
        await evaluate(case.bus, case.trainer, build_model(), cut, micro_slice=3, tokenizer="cd" * 32)


async def test_each_checkpoint_is_evaluated_and_the_best_is_promoted(case: Case) -> None:
    await case.validate_on(*ECHOES)
    heads = [await case.checkpoint(step, model_of(s)) for step, s in ((1, 1.0), (2, 2.0), (3, 0.5))]
    await case.run()
    results = await case.results()
    assert [r["step"] for r in results] == [1, 2, 3]
    assert [r["best"] for r in results] == [True, True, False]
    assert results[1]["validation_loss"] < results[0]["validation_loss"] < results[2]["validation_loss"]
    assert results[0]["validation_records"] == 8
    assert results[0]["perplexity"] == pytest.approx(math.exp(results[0]["validation_loss"]))
    assert results[0]["cut"] == await take(case.bus, case.trainer.validation)
    assert {(r["job"], r["evaluation"]) for r in results} == {(case.trainer.name, case.name)}
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.manifest == heads[1].manifest
    # Evaluated with those very weights, and found again by name.
    model = build_model()
    loaded = await load_into(model, case.store, case.trainer.name, "best")
    assert loaded.manifest.step == 2
    assert torch.equal(model.embedding.weight, model_of(2.0).embedding.weight)
    # A second start finds nothing new.
    assert (await case.run()).evaluated == 0
    assert len(await case.results()) == 3


async def test_when_the_cut_moved_the_incumbent_is_evaluated_again(case: Case) -> None:
    await case.validate_on(*ECHOES[:2])
    await case.checkpoint(1, model_of(2.0))
    await case.run()
    await case.validate_on(*ECHOES[2:])
    await case.checkpoint(2, model_of(1.0))
    await case.run()
    first, again, second = await case.results()
    assert (first["step"], again["step"], second["step"]) == (1, 1, 2)
    assert first["cut"] != again["cut"] == second["cut"]
    assert (again["best"], second["best"]) == (True, False)
    assert again["validation_records"] == 8
    assert "cut moved" in again["reason"]
    # The next one at the same cut is compared with the new figure: once is enough.
    await case.checkpoint(3, model_of(3.0))
    await case.run()
    assert [(r["step"], r["best"]) for r in (await case.results())[3:]] == [(3, True)]


async def test_without_validation_records_the_latest_is_promoted_and_nothing_hangs(case: Case) -> None:
    heads = [await case.checkpoint(step, model_of(1.0)) for step in (1, 2)]
    await case.run()
    results = await case.results()
    assert [r["validation_loss"] for r in results] == [None, None]
    assert [r["perplexity"] for r in results] == [None, None]
    assert all(r["reason"].startswith("no validation records") for r in results)
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.manifest == heads[1].manifest


async def test_a_checkpoint_that_cannot_be_evaluated_is_told(case: Case) -> None:
    await case.validate_on(*ECHOES)
    gone = await case.checkpoint(1, model_of(1.0))
    await case.store.delete(gone.manifest)
    case.head = None
    await case.store.delete(f"jobs/{case.trainer.name}/head.json")
    other = GPT(GPTConfig(vocabulary=48, layers=1, heads=2, width=16, hidden=16))
    await case.checkpoint(2, other)
    await case.checkpoint(3, model_of(1.0))
    await case.announce(case.head, job="somebody else's")  # type: ignore[arg-type]
    await case.announce(case.head, manifest=None)  # type: ignore[arg-type]
    await case.run()
    results = await case.results()
    assert [(r["step"], r["best"]) for r in results] == [(1, False), (2, False), (3, True)]
    assert results[0]["reason"] == "gone"
    assert results[0]["validation_loss"] is None
    assert "the model has float32 [32, 16], the checkpoint float32 [48, 16]" in results[1]["reason"]


async def test_an_incumbent_that_was_pruned_gives_way(case: Case) -> None:
    await case.validate_on(*ECHOES[:2])
    first = await case.checkpoint(1, model_of(2.0))
    await case.run()
    await case.validate_on(*ECHOES[2:])
    await case.checkpoint(2, model_of(1.0))
    await case.store.delete(first.manifest)
    await case.run()
    results = await case.results()
    assert [(r["step"], r["best"], r["reason"].split(",")[0]) for r in results[1:]] == [
        (1, False, "gone"),
        (2, True, "the promoted one"),
    ]


@pytest.mark.parametrize("point", ["evaluator.before_commit", "evaluator.after_commit"])
async def test_a_crash_around_the_commit_repeats_nothing_and_loses_nothing(
    case: Case, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await case.validate_on(*ECHOES)
    heads = [await case.checkpoint(step, model_of(s)) for step, s in ((1, 1.0), (2, 2.0))]
    monkeypatch.setattr(faults, "_faults", [{"point": point, "step": 2, "action": "raise"}])
    monkeypatch.setattr(faults, "_reached", {})
    with pytest.raises(RuntimeError, match=point):
        await asyncio.wait_for(case.evaluator().run(asyncio.Event()), 60)
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.step == 1
    assert len(await case.results()) == (1 if point.endswith("before_commit") else 2)
    monkeypatch.setattr(faults, "_faults", [])
    await case.run()
    assert [r["step"] for r in await case.results()] == [1, 2]
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.manifest == heads[1].manifest


async def test_a_second_evaluator_takes_over_from_the_first(case: Case) -> None:
    await case.validate_on(*ECHOES)
    await case.checkpoint(1, model_of(1.0))
    stop = asyncio.Event()
    old = asyncio.create_task(case.evaluator().run(stop))
    while not await case.caught_up():
        await asyncio.sleep(0.02)
    new = asyncio.create_task(case.evaluator().run(stop))
    fenced = False
    for step in range(2, 30):
        await case.checkpoint(step, model_of(1.0 + step / 10))
        while not await case.caught_up():
            await asyncio.sleep(0.02)
        done = [task for task in (old, new) if task.done()]
        if done:
            with pytest.raises(Fenced):
                await done[0]
            fenced = done[0] is old
            break
    stop.set()
    await asyncio.gather(old, new, return_exceptions=True)
    assert fenced
    steps = [r["step"] for r in await case.results()]
    assert steps == sorted(set(steps))


async def test_a_stop_in_the_middle_is_taken_up_again(case: Case) -> None:
    await case.validate_on(*ECHOES)
    await case.checkpoint(1, model_of(1.0))
    stop = asyncio.Event()
    evaluator = case.evaluator()
    inner = case.trainer.loss
    loop = asyncio.get_running_loop()

    def stopping(model: Any, batch: Any) -> Any:
        loop.call_soon_threadsafe(stop.set)
        return inner(model, batch)

    object.__setattr__(case.trainer, "loss", stopping)
    await asyncio.wait_for(evaluator.run(stop), 20)
    assert await case.results() == []
    object.__setattr__(case.trainer, "loss", inner)
    await case.run()
    assert [r["step"] for r in await case.results()] == [1]


async def test_a_checkpoint_that_falls_out_of_the_newest_while_it_is_evaluated_is_promoted_all_the_same(
    case: Case,
) -> None:
    """The trainer saves and prunes on while a slow evaluator computes."""
    await case.validate_on(*ECHOES)
    slow = await case.checkpoint(1, model_of(2.0))
    inner, loop, pruned = case.trainer.loss, asyncio.get_running_loop(), []

    async def further() -> None:
        for step in (2, 3, 4):
            await case.save(step, model_of(1.0 + step / 10))
        pruned.append(await prune(case.store, case.trainer.name, 2))

    def during(model: Any, batch: Any) -> Any:
        if not pruned:
            asyncio.run_coroutine_threadsafe(further(), loop).result(30)
        return inner(model, batch)

    object.__setattr__(case.trainer, "loss", during)
    await case.run()
    assert len(pruned[0].manifests) == 1
    assert [(r["step"], r["best"]) for r in await case.results()] == [(1, True)]
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.ref == slow.ref
    assert not (await verify(case.store, best.ref)).problems
    await case.checkpoint(5, model_of(1.0))
    await case.run()  # held now: another; the promoted one stays by its alias
    await prune(case.store, case.trainer.name, 2)
    assert not (await verify(case.store, best.ref)).problems


async def test_the_alias_does_not_follow_to_a_checkpoint_that_is_gone(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the alias was moved, and then the promoted checkpoint was deleted by hand."""
    await case.validate_on(*ECHOES)
    heads = [await case.checkpoint(step, model_of(s)) for step, s in ((1, 1.0), (2, 2.0))]
    monkeypatch.setattr(faults, "_faults", [{"point": "evaluator.after_commit", "step": 2, "action": "raise"}])
    monkeypatch.setattr(faults, "_reached", {})
    with pytest.raises(RuntimeError, match="after_commit"):
        await asyncio.wait_for(case.evaluator().run(asyncio.Event()), 60)
    monkeypatch.setattr(faults, "_faults", [])
    await case.store.delete(heads[1].manifest)
    await case.run()
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.ref == heads[0].ref
    case.head = None
    await case.store.delete(f"jobs/{case.trainer.name}/head.json")
    third = await case.checkpoint(3, model_of(0.5))
    await case.run()
    best = await alias.get(case.store, case.trainer.name, "best")
    assert best is not None
    assert best.ref == third.ref


async def test_a_reader_that_stalls_is_replaced(case: Case) -> None:
    first = FirstIsSilent(case.bus)
    evaluator = Evaluator(first, case.store, case.evaluation, case.trainer, topics=case.topics, clock=Fast())
    stop = asyncio.Event()
    running = asyncio.create_task(evaluator.run(stop))
    await case.checkpoint(1, model_of(1.0))
    async with asyncio.timeout(60):
        while not await case.results():
            await asyncio.sleep(0.02)
    stop.set()
    await running
    assert [r["step"] for r in await case.results()] == [1]


async def test_the_evaluator_has_no_lag_past_a_transactions_marker(case: Case) -> None:
    await case.checkpoint(1, model_of(1.0))
    await case.run()
    place = TopicPartition(case.topics.checkpoints, 0)
    committed = (await case.bus.committed(f"megaflow.evaluate.{case.name}"))[place]
    assert committed == (await case.bus.end_offsets([place]))[place] == 2


async def test_many_evaluations_leave_no_memory_and_no_connection(case: Case) -> None:
    await case.validate_on(*ECHOES)
    cut = await take(case.bus, case.trainer.validation)
    model, process, marks = model_of(1.0), psutil.Process(), []
    for number in range(200):
        await evaluate(case.bus, case.trainer, model, cut, micro_slice=3)
        if number in (49, 199):
            gc.collect()
            marks.append((process.memory_info().rss, len(process.net_connections()), len(asyncio.all_tasks())))
    assert marks[1][0] - marks[0][0] < 8 << 20
    assert marks[1][1] <= marks[0][1]
    assert marks[1][2] <= marks[0][2]


def test_tensors_must_be_the_models_own() -> None:
    model = build_model()
    tensors = [item for item in tensors_of(model_of(1.0)) if item[0].kind in MODEL]
    before = model.embedding.weight.clone()
    with pytest.raises(DoesNotFit, match="lacks 1 tensors"):
        put_into(model, tensors[:-1])
    with pytest.raises(DoesNotFit, match="no such tensor"):
        put_into(model, tensors_of(model_of(1.0)))
    assert torch.equal(model.embedding.weight, before)
    put_into(model, tensors)
    assert torch.equal(model.embedding.weight, model_of(1.0).embedding.weight)


async def test_a_checkpoint_loads_by_step_too(case: Case) -> None:
    await case.save(1, model_of(1.0))
    await case.save(2, model_of(2.0))
    model = build_model()
    assert (await load_into(model, case.store, case.trainer.name, 1)).manifest.step == 1
    assert torch.equal(model.embedding.weight, model_of(1.0).embedding.weight)
    assert (await load(case.store, case.trainer.name)).manifest.step == 2


def test_the_program_of_the_documentation_loads_a_checkpoint(
    s3: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code block of docs/operations.md as it stands, but for the addresses and the job's name."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/operations.md").read_text(), re.DOTALL | re.MULTILINE)
    job = f"job-{secrets.token_hex(6)}"
    for documented, here in {
        "http://localhost:8333": s3.endpoint_url,
        '"megaflow"': '"test-storage"',
        "KEY": s3.access_key,
        "SECRET": s3.secret_key,
        '"model_finetune"': f'"{job}"',
    }.items():
        assert code.count(documented) == 1
        code = code.replace(documented, here)
    monkeypatch.syspath_prepend(str(ROOT))
    torch.manual_seed(7)
    trained = build_reference_model()

    async def save() -> None:
        store = S3Store(
            endpoint_url=s3.endpoint_url, bucket="test-storage", access_key=s3.access_key, secret_key=s3.secret_key
        )
        await store.open()
        snapshot = Snapshot(step=12, tensors=tensors_of(trained), state={"offsets": {"features.agent/0": 1}})
        head = await CheckpointWriter(store, job).save(snapshot, None)
        await alias.move(store, job, "best", head.ref, None, {})
        await store.close()

    asyncio.run(save())
    found: dict[str, Any] = {}
    exec(compile(code, "docs/operations.md", "exec"), found)
    assert capsys.readouterr().out == "the weights of step 12\n"
    loaded = found["model"].state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.state_dict().items())
