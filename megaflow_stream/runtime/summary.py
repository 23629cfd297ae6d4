"""What a run did: asked of the topics and the checkpoints, not counted on the way, so that restarts lose nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.checkpoint import alias
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.observe.scan import scan
from megaflow_stream.runtime.curve import Totals, plot_png, plot_text, steps, totals
from megaflow_stream.storage.api import ObjectStore

Positions = Mapping[TopicPartition, int]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where every topic ended when the run began: what lies behind it is the run's own."""

    ends: Mapping[str, Positions]

    @classmethod
    async def now(cls, bus: Bus, topics: Sequence[str]) -> Mark:
        return cls(ends={topic: await bus.end_offsets(await bus.partitions(topic)) for topic in topics})


@dataclass(kw_only=True)
class Summary:
    """The figures of one run. Losses are in nats a token; `None` where nothing was trained or evaluated.

    error: why the run failed; its other figures are what is known up to then.
    """

    conversations_published: int = 0
    already_published: int = 0
    publish_rejected: int = 0
    stages: dict[str, dict[str, int]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    dead_letter_reasons: dict[str, int] = field(default_factory=dict)
    features_written: int = 0
    padding_share: float | None = None
    steps: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    checkpoints: int = 0
    last_checkpoint: str | None = None
    validation_loss: float | None = None
    perplexity: float | None = None
    evaluations: int = 0
    evaluation_note: str = ""
    promoted_checkpoint: str | None = None
    restarts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    nothing_new: bool = False
    run_folder: str = ""
    error: str | None = None

    @property
    def dead_letters(self) -> int:
        return sum(self.dead_letter_reasons.values())

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "dead_letters": self.dead_letters}


async def processed(bus: Bus, mark: Mark, summary: Summary) -> None:
    """Fills in what the processors did since the mark: records by stage, drops, dead letters, padding."""
    stages: dict[str, Counter[str]] = {}
    async for record in scan(bus, "processing.statistics", begin=mark.ends["processing.statistics"]):
        value = orjson.loads(record.value or b"{}")
        stages.setdefault(value["processor"], Counter()).update(value["counts"])
    summary.stages = {name: dict(counts) for name, counts in stages.items()}
    for counts in stages.values():
        summary.features_written += counts.get("sequences", 0)
        if total := counts.get("tokens", 0) + counts.get("padding_tokens", 0):
            summary.padding_share = counts.get("padding_tokens", 0) / total
    dropped: Counter[str] = Counter()
    async for record in scan(bus, "conversations.dropped", begin=mark.ends["conversations.dropped"]):
        dropped[orjson.loads(record.value or b"{}")["reason"]] += 1
    summary.dropped = dict(dropped.most_common())
    letters: Counter[str] = Counter()
    async for record in scan(bus, "dlq", begin=mark.ends["dlq"]):
        error = dict(record.headers).get("error", b"?").decode(errors="replace")
        letters[_kind(error)] += 1
    summary.dead_letter_reasons = dict(letters.most_common())


def _kind(error: str) -> str:
    """What errors of one kind have in common: without the place in the conversation and what is quoted from it."""
    first = re.sub(r"^message \d+: ", "", error.partition("\n")[0])
    return re.sub(r" '[^']*'", "", first)[:120]


async def trained(
    bus: Bus,
    store: ObjectStore,
    mark: Mark,
    summary: Summary,
    trainers: Sequence[Trainer],
    before: Mapping[str, Totals],
    folder: Path,
) -> None:
    """Fills in what the trainers did since the mark, when their totals were `before`, and plots it into the folder."""
    announced: dict[str, list[tuple[int, float]]] = {}
    async for value in _values(bus, "checkpoints", mark):
        summary.checkpoints += 1
        summary.last_checkpoint = value["manifest"]
        if value["loss"] is not None:
            announced.setdefault(value["job"], []).append((value["step"], value["loss"]))
    for trainer in trainers:
        first, last = before[trainer.name], await totals(store, trainer.name)
        summary.steps += last.step - first.step
        summary.tokens += last.tokens - first.tokens
        curve = await steps(store, trainer.name, first.step, announced.get(trainer.name, ()))
        if not curve:
            continue
        summary.first_loss = curve[0].loss if first.step else last.first_loss
        summary.last_loss = curve[-1].loss
        seconds = sum(step.seconds for step in curve)
        summary.tokens_per_second = round(sum(step.tokens for step in curve) / seconds, 1) if seconds else None
        validation = [
            (value["step"], value["validation_loss"])
            async for value in _values(bus, "evaluations")
            if value["job"] == trainer.name and value["validation_loss"] is not None
        ]
        name = "loss" if len(trainers) == 1 else f"loss.{trainer.name}"
        plot_png(curve, validation, folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(plot_text(curve) + "\n")


async def evaluated(
    bus: Bus, store: ObjectStore, mark: Mark, summary: Summary, evaluations: Sequence[Evaluation]
) -> None:
    """Fills in the evaluations since the mark, and what is promoted now."""
    async for value in _values(bus, "evaluations", mark):
        summary.evaluations += 1
        summary.validation_loss, summary.perplexity = value["validation_loss"], value["perplexity"]
        summary.evaluation_note = value.get("reason", "") if value["validation_loss"] is None else ""
    for evaluation in evaluations:
        promoted = await alias.get(store, evaluation.trainer, evaluation.alias)
        summary.promoted_checkpoint = promoted.ref.manifest if promoted else summary.promoted_checkpoint


async def _values(bus: Bus, topic: str, mark: Mark | None = None) -> AsyncIterator[dict[str, Any]]:
    async for record in scan(bus, topic, begin=mark.ends[topic] if mark else None):
        yield orjson.loads(record.value or b"{}")


def loss_plot(folder: str) -> str:
    """The curves that a run left as text, empty where it trained nothing."""
    return "\n".join(path.read_text().rstrip() for path in sorted(Path(folder).glob("loss*.txt")))


def text(summary: Summary) -> str:
    """The summary as a person reads it at the end of a run."""
    s = summary
    lines = []
    if s.nothing_new:
        lines.append("nothing new: no conversation came that is not processed, trained and evaluated already")
    lines.append(
        f"published      {s.conversations_published:,} conversations"
        + (f", {s.already_published:,} were there already" if s.already_published else "")
        + (f", {s.publish_rejected:,} refused (rejects.jsonl)" if s.publish_rejected else "")
    )
    for name, counts in s.stages.items():
        shown = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in counts.items() if count)
        lines.append(f"{name:<14} {shown}")
    if s.padding_share is not None:
        lines.append(f"packing        {s.features_written:,} sequences, {s.padding_share:.1%} padding")
    lines += [f"dropped        {count:,} {reason}" for reason, count in s.dropped.items()]
    lines += [f"dead letters   {count:,} {reason}" for reason, count in s.dead_letter_reasons.items()]
    if s.steps:
        rate = f", {s.tokens_per_second:,.0f} tokens/s" if s.tokens_per_second else ""
        lines.append(f"trained        {s.steps:,} steps, {s.tokens:,} tokens{rate}")
        if s.first_loss is not None and s.last_loss is not None:
            lines.append(f"loss           {s.first_loss:.4f} -> {s.last_loss:.4f}")
    if s.validation_loss is not None and s.perplexity is not None:
        lines.append(f"validation     loss {s.validation_loss:.4f}, perplexity {s.perplexity:.1f}")
    elif s.evaluation_note:
        lines.append(f"validation     {s.evaluation_note}")
    if s.promoted_checkpoint:
        lines.append(f"promoted       {s.promoted_checkpoint}")
    if s.restarts:
        lines.append("restarted      " + ", ".join(f"{name} {count} times" for name, count in s.restarts.items()))
    lines.append("time           " + ", ".join(f"{part} {seconds:.1f} s" for part, seconds in s.seconds.items()))
    lines += ["", "next:"]
    lines.append("  megaflow checkpoints list        every checkpoint, and which is promoted")
    lines.append("  megaflow lineage best            the conversations that made it")
    lines.append("  megaflow dlq list                what could not be processed, and why")
    lines.append("  megaflow publish FILE; megaflow run --until-idle   trains on exactly what is new")
    if s.run_folder:
        lines.append(f"the loss curve and the logs of every component: {s.run_folder}")
    return "\n".join(lines)
