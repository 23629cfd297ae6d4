"""What must be true of a pipeline whatever befell it: each conversation once at each stage, from file to weights.

What should be there is worked out from what lies before it: the input files, then each topic by its undisturbed
processor, then the topics by their own records. The weights are compared with those of a replay, byte by byte.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import orjson

from megaflow_stream import checkpoint
from megaflow_stream.bus.api import Record
from megaflow_stream.checkpoint import Loaded, lineage
from megaflow_stream.conversations.files import Document, read, sources
from megaflow_stream.definitions.processor import Result
from megaflow_stream.errors import BadRecord
from megaflow_stream.features import record
from megaflow_stream.processing.frames import input_batch
from megaflow_stream.project.folder import Project, find
from megaflow_stream.publishing.publish import max_message_bytes
from megaflow_stream.publishing.record import Recorder
from megaflow_stream.runtime.connection import Connection, connected
from tests.engine_cases.case import everything
from tests.fault.pipeline_case import JOB, Pipeline

FEATURES = ("features.agent", "features.agent.validation")
_TOPICS = (
    "conversations.raw",
    "conversations.clean",
    "conversations.dropped",
    "dlq",
    "processing.statistics",
    "dataset.statistics",
    "checkpoints",
    "evaluations",
    *FEATURES,
)
Topic = Mapping[int, Sequence[Record]]  # a topic's records by partition


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared: problems is empty when all is well. counts: how much there was of everything."""

    problems: list[str]
    counts: dict[str, int]
    weights_sha256: str


async def prove(pipeline: Pipeline) -> Proof:
    """Replays the plan of a pipeline that has come to rest, then compares everything."""
    project = find(pipeline.root)
    async with connected(project, project.settings) as connection:
        replayed = await asyncio.to_thread(pipeline.replay)
        return await _Look(project, connection, pipeline.published).look(replayed)


class _Look:
    def __init__(self, project: Project, connection: Connection, published: Sequence[Path]) -> None:
        self.project, self.bus, self.store = project, connection.bus, connection.store
        self.published_files = published
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}

    async def look(self, replayed: str) -> Proof:
        self.topics: dict[str, Topic] = {name: await everything(self.bus, name) for name in _TOPICS}
        await self._published(await max_message_bytes(self.bus, "conversations.raw"))
        self._processed()
        await self._trained()
        await self._chain()
        await self._evaluated()
        self._counted()
        weights = await self._weights(replayed)
        return Proof(problems=self.problems, counts=self.counts, weights_sha256=weights)

    def _same(self, what: str, expected: Counter[Any], got: Counter[Any]) -> None:
        self.counts[what] = got.total()
        if expected != got:
            lost, extra = expected - got, got - expected
            shown = [str(item)[:200] for item in [*lost, *extra][:2]]
            self.problems.append(f"{what}: {lost.total()} lost, {extra.total()} too many: {shown}")

    async def _published(self, most_bytes: int) -> None:
        """Every good document of every input is on the topic once, verbatim."""
        settings = self.project.settings.publish
        recorder = Recorder(
            dataset=settings.dataset, producer=settings.producer, format="auto", max_message_bytes=most_bytes
        )
        expected: Counter[Hashable] = Counter()
        for source in sources(self.published_files):
            for item in read(source):
                if isinstance(item, Document):
                    try:
                        expected[recorder.prepare(item.raw, item.document)[:2]] += 1
                    except BadRecord:
                        continue
        self._same("published", expected, Counter((r.key, r.value) for r in self._rows("conversations.raw")))

    def _processed(self) -> None:
        """What both processors make of their input, record by record, is what is there: outputs, drops, letters."""
        (_, clean), (_, features) = self.project.processors("data_preprocess")
        drops: Counter[Hashable] = Counter()
        letters: Counter[Hashable] = Counter()
        cleaned: Counter[Hashable] = Counter()
        made: Counter[Hashable] = Counter()
        for processor, unique in ((clean, False), (features, True)):
            handler = processor.build()
            for partition, rows in self.topics[processor.source].items():
                seen: set[bytes | None] = set()
                for row in rows:
                    place = (processor.name, processor.source, partition, row.offset)
                    if unique and row.key in seen:
                        drops[*place, "duplicate"] += 1
                        continue
                    result = handler(input_batch(processor, [row], processor.source, partition))
                    if not result.rejected:
                        seen.add(row.key)
                    drops.update((*place, drop.reason) for drop in result.dropped)
                    letters.update(place for _ in result.rejected)
                    if processor is clean:
                        cleaned.update(_cleaned(result))
                    else:
                        made.update(_made(result, partition))
        self._same("clean", cleaned, Counter(_source(r) for r in self._rows("conversations.clean")))
        self._same("features", made, Counter(p for topic in FEATURES for r in self._rows(topic) for p in _pieces(r)))
        said = [orjson.loads(r.value or b"") for r in self._rows("conversations.dropped")]
        places = [(v["processor"], v["topic"], v["partition"], v["offset"], v["reason"]) for v in said]
        self._same("dropped", drops, Counter(places))
        self._same("dead letters", letters, Counter(_origin(r) for r in self._rows("dlq")))

    async def _trained(self) -> None:
        """Every feature record is in the lineage once, with each of its conversations, and steps have no gap."""
        top = await checkpoint.load(self.store, JOB)
        rows = (await lineage.of_checkpoint(self.store, top.manifest)).to_pylist()
        expected = Counter(
            (r.partition, r.offset, conversation)
            for r in self._rows("features.agent")
            for conversation in set(record.decode(r.value or b"").conversations)
        )
        self._same("trained", expected, Counter((r["partition"], r["offset"], r["conversation"]) for r in rows))
        steps = sorted({r["step"] for r in rows})
        if steps != list(range(1, top.manifest.step + 1)):
            self.problems.append(f"steps: {len(steps)} in the lineage, the last checkpoint is of {top.manifest.step}")
        self.counts["steps"] = len(steps)

    async def _chain(self) -> None:
        """Every checkpoint from the head down is whole, and was announced."""
        top = await checkpoint.head(self.store, JOB)
        good: set[str] = set()
        announced = {value["manifest"] for value in self._values("checkpoints")}
        self.counts["checkpoints"] = 0
        async for ref, _ in checkpoint.chain(self.store, top.ref if top else None):
            self.counts["checkpoints"] += 1
            self.problems += (await checkpoint.verify(self.store, ref, good=good)).problems
            if ref.manifest not in announced:
                self.problems.append(f"checkpoints: step {ref.step} was never announced")

    async def _evaluated(self) -> None:
        """One evaluation of each announcement, in their order, but for the promoted one's again on a later cut; what
        is promoted is the best that they say."""
        waiting = self._values("checkpoints")
        results = self._values("evaluations")
        self.counts["evaluations"] = len(results)
        stored = {info.key async for info in self.store.list(f"{checkpoint.names.prefix(JOB)}manifests/")}
        best: dict[str, Any] | None = None
        for value in results:
            again = best is not None and value["manifest"] == best["manifest"] and value["cut"] != best["cut"]
            if not again:
                if [value["manifest"]] != [announced["manifest"] for announced in waiting[:1]]:
                    self.problems.append(f"evaluations: step {value['step']} is not what was announced next")
                waiting = waiting[1:]
            if value["gone"] and value["manifest"] in stored:
                self.problems.append(f"evaluations: step {value['step']} was called gone and is there")
            if value["best"] != (again or _better(value, best)):
                self.problems.append(f"evaluations: step {value['step']} is the best or not: {value['reason']}")
            best = value if value["best"] else best
        if waiting:
            missing = [announced["step"] for announced in waiting]
            self.problems.append(f"evaluations: none of the steps {missing}, which were announced")
        alias = await checkpoint.alias.get(self.store, JOB, "best")
        if (alias and alias.manifest) != (best and best["manifest"]):
            self.problems.append(f"promoted: {alias}, not what the evaluations say: {best}")

    def _counted(self) -> None:
        """No count of a processor is served twice, and of each source the ranges come one behind another."""
        expected: Counter[Hashable] = Counter()
        ranges: dict[tuple[str, str, str, int], list[tuple[int, int]]] = {}
        for value in self._values("processing.statistics"):
            whose = value["dataset"], value["producer"], value["processor"]
            ranges.setdefault((*whose, value["partition"]), []).append((value["begin"], value["end"]))
            for name, count in value["counts"].items():
                expected[*whose, name] += count
        for source, found in ranges.items():
            if any(later[0] < earlier[1] for earlier, later in pairwise(found)):
                self.problems.append(f"statistics: ranges of {source} are counted twice or out of order")
        served: dict[bytes | None, dict[str, Any]] = {
            r.key: orjson.loads(r.value or b"") for r in self._rows("dataset.statistics")
        }
        got: Counter[Hashable] = Counter()
        for value in served.values():
            for processor, counts in value["counts"].items():
                got.update({(value["dataset"], value["producer"], processor, name): n for name, n in counts.items()})
        self._same("statistics", +expected, +got)

    async def _weights(self, replayed: str) -> str:
        """The bytes of the last checkpoint, as S3 has them, are those of the replay's; optimizer included."""
        ours, other = await checkpoint.load(self.store, JOB), await checkpoint.load(self.store, f"{JOB}.replay")
        if ours.skipped or other.skipped:
            self.problems.append(f"weights: a damaged checkpoint: {[*ours.skipped, *other.skipped]}")
        if ours.manifest.step != other.manifest.step:
            self.problems.append(f"weights: of step {ours.manifest.step}, the replay's of {other.manifest.step}")
        differ = [name for name, digest in _digests(ours).items() if _digests(other).get(name) != digest]
        if differ or _digests(ours).keys() != _digests(other).keys():
            self.problems.append(f"weights: {len(differ)} tensors differ from the replay's: {differ[:5]}")
        weights = _weights_sha256(ours)
        said = {weights, _weights_sha256(other), replayed, ours.manifest.state["weights_sha256"]}
        if len(said) > 1:
            self.problems.append(f"weights: the digests differ: {said}")
        return weights

    def _rows(self, topic: str) -> list[Record]:
        return [row for rows in self.topics[topic].values() for row in rows]

    def _values(self, topic: str) -> list[dict[str, Any]]:
        return [orjson.loads(row.value or b"") for row in self._rows(topic)]


def _better(value: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    """Whether an evaluation is to take the place of the best one so far."""
    if best is None or value["gone"]:
        return not value["gone"]
    if value["validation_loss"] is None or best["validation_loss"] is None:
        return bool(best["validation_loss"] is None)
    return bool(value["cut"] == best["cut"] and value["validation_loss"] < best["validation_loss"])


def _source(row: Record) -> Hashable:
    return dict(row.headers)["source"].decode(), row.key, row.value


def _cleaned(result: Result) -> list[Hashable]:
    """What `_source` gives of the records that this result becomes."""
    rows = [row for batch in result.outputs.values() for row in batch.to_pylist()]
    return [(row["header:source"], row["key"], row["value"]) for row in rows]


def _pieces(row: Record) -> list[Hashable]:
    return _documents(row.topic, row.partition, row.value or b"")


def _made(result: Result, partition: int) -> list[Hashable]:
    """What `_pieces` gives of the records that this result becomes, with whatever it is packed together."""
    outputs = result.outputs.items()
    return [
        p
        for topic, batch in outputs
        for v in batch.column("value").to_pylist()
        for p in _documents(topic, partition, v)
    ]


def _documents(topic: str, partition: int, value: bytes) -> list[Hashable]:
    """Each document of a packed sequence, by its very tokens: (topic, partition, conversation, tokens and mask)."""
    sequence = record.decode(value)
    ends = [0, *accumulate(sequence.lengths.tolist())]
    found: list[Hashable] = []
    for conversation, (begin, end) in zip(sequence.conversations, pairwise(ends), strict=True):
        digest = hashlib.sha256(sequence.tokens[begin:end].tobytes() + sequence.loss_mask[begin:end].tobytes())
        found.append((topic, partition, conversation, digest.hexdigest()))
    return found


def _origin(row: Record) -> Hashable:
    headers = {name: value.decode() for name, value in row.headers}
    place = headers["processor"], headers["origin-topic"]
    return *place, int(headers["origin-partition"]), int(headers["origin-offset"])


def _digests(loaded: Loaded) -> dict[str, tuple[object, str]]:
    return {spec.name: (spec, hashlib.sha256(view).hexdigest()) for spec, view in loaded.tensors}


def _weights_sha256(loaded: Loaded) -> str:
    """As `megaflow train` gives it: over names and bytes of the model's tensors, in their order."""
    digest = hashlib.sha256()
    for spec, view in loaded.tensors:
        if spec.kind in checkpoint.MODEL:
            digest.update(spec.name.encode())
            digest.update(view)
    return digest.hexdigest()
