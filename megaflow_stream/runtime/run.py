"""`megaflow run`: the whole pipeline.

services up ─▶ topics applied ─▶ children started, input published ─▶ settled, or a signal ─▶ stopped ─▶ summary
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson

from megaflow_stream.bus.api import Bus, TopicPartition
from megaflow_stream.checkpoint import alias
from megaflow_stream.config.settings import Settings
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.lag import Follower, measure
from megaflow_stream.observe.scan import scan
from megaflow_stream.observe.status import StatusWriter, read_status
from megaflow_stream.project import topics as declared
from megaflow_stream.project.check import check, workers
from megaflow_stream.project.folder import Project
from megaflow_stream.publishing.publish import publish
from megaflow_stream.runtime import services, summary
from megaflow_stream.runtime.child import Child
from megaflow_stream.runtime.connection import Connection, connected
from megaflow_stream.runtime.curve import Step, plot_png, plot_text, steps
from megaflow_stream.runtime.lifeline import Lifeline
from megaflow_stream.runtime.report import Report
from megaflow_stream.runtime.settled import Settled
from megaflow_stream.runtime.summary import Mark, Summary
from megaflow_stream.runtime.supervisor import Supervisor

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
_MARKED = ("processing.statistics", "conversations.dropped", "dlq", "checkpoints", "evaluations")
_STATISTICS_SECONDS = 10.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run consists of, known before anything is started.

    inputs: files of the user's own; none publishes the project's samples. workers: by stage.
    """

    project: Project
    settings: Settings
    inputs: Sequence[str]
    until_idle: bool
    workers: dict[str, int] = field(default_factory=dict)
    processors: list[Processor] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    ranks: dict[str, int | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def sources(self) -> list[str]:
        """What is published: the inputs given, else the samples that the project carries."""
        if self.inputs:
            return list(self.inputs)
        samples = self.project.root / "topics" / "samples"
        return [str(samples)] if self.settings.publish.samples and samples.is_dir() else []


def plan(project: Project, settings: Settings, inputs: Sequence[str], *, until_idle: bool) -> Plan:
    """Loads every definition and checks it. Raises `SettingError`: nothing has been started then."""
    made = Plan(project=project, settings=settings, inputs=inputs, until_idle=until_idle, notes=check(project))
    for stage in project.pipeline().ordered():
        kind = project.kind(stage)
        if kind == "processor":
            made.processors.extend(processor for _, processor in project.processors(stage))
            made.workers[stage.name] = workers(project, stage)
        elif kind == "trainer":
            made.trainers.append(project.trainer(stage.name)[1])
            made.ranks[stage.name] = settings.run.trainer_ranks or stage.ranks
        else:
            made.evaluations.append(project.evaluation(stage.name)[1])
    return made


class Run:
    """One run. `stop` ends it in order."""

    def __init__(self, plan: Plan, report: Report, stop: asyncio.Event) -> None:
        self.plan, self.report, self.stop = plan, report, stop
        self.folder = plan.project.state_dir / "runs" / time.strftime("%Y%m%d-%H%M%S")
        self.summary = Summary(run_folder=str(self.folder))
        self.begun = self.part_at = time.monotonic()
        self.restarts: dict[str, int] = {}
        self._waited = ""

    async def run(self) -> Summary:
        self.folder.mkdir(parents=True, exist_ok=True)
        for note in self.plan.notes:
            self.report.event("warning", note=note)
        async with contextlib.AsyncExitStack() as stack:
            # A first start may take minutes: Ctrl-C ends it.
            begin = stack.enter_async_context(connected(self.plan.project, self.plan.settings))
            connection = await self._unless_over(begin)
            if connection is None:
                return self.summary
            endpoints = connection.endpoints
            self._part("services")
            self.report.event(
                "services",
                kafka=endpoints.bootstrap_servers,
                s3=endpoints.endpoint_url,
                seconds=self.summary.seconds["services"],
            )
            await self._topics(connection)
            async with StatusWriter(connection.bus, "run", "run") as status:
                await self._with(connection, status)
            self.part_at = time.monotonic()
        self._part("services down")
        self.summary.seconds["total"] = round(time.monotonic() - self.begun, 1)
        (self.folder / "summary.json").write_text(json.dumps(self.summary.to_json(), default=str, indent=2))
        return self.summary

    def _part(self, name: str) -> None:
        now = time.monotonic()
        self.summary.seconds[name] = round(self.summary.seconds.get(name, 0.0) + now - self.part_at, 1)
        self.part_at = now

    async def _topics(self, connection: Connection) -> None:
        changes = await declared.diff(connection.bus, self.plan.project.topics())
        copies = self.plan.settings.kafka.replication_factor
        made = await declared.apply(connection.bus, changes, replication_factor=copies)
        self.report.event("topics", made=len(made))
        self._part("topics")

    async def _with(self, connection: Connection, status: StatusWriter) -> None:
        plan, bus = self.plan, connection.bus
        await status.update("running")
        mark = await Mark.now(bus, _MARKED)
        before = {t.name: await self._step(connection, t.name) for t in plan.trainers}
        settled = Settled(bus, plan.processors, plan.trainers, plan.evaluations, self._waiting)
        with Lifeline() as lifeline:
            supervisor = Supervisor(self._children(lifeline), self._restart_services(), self._service_restarted)
            supervisor.watch_services()
            try:
                # A pipeline with work left starts at once; one without is asked again after publishing.
                started = not plan.until_idle or not await settled.now()
                if started:
                    supervisor.start()
                await self._unless_over(self._publish(connection), supervisor)
                if not started and self.summary.conversations_published:
                    started = True
                    supervisor.start()
                if not started and not self.stop.is_set():
                    self.summary.nothing_new = True
                    self.report.event("idle")
                elif started:
                    await self._until(settled, supervisor, connection)
            finally:
                self.report.event("stopping")
                await status.update("stopping")
                await supervisor.stop()
                self._part("stopping")
        await self._summarise(connection, mark, before)
        self._part("summary")

    def _children(self, lifeline: Lifeline) -> list[Child]:
        plan = self.plan
        common = ["--project", str(plan.project.root)]
        # Flags given to the run reach its children; the environment and the project's files do by themselves.
        if plan.project.loaded.origins.get("kafka.bootstrap_servers", "").startswith("--"):
            common += ["--bootstrap-servers", str(plan.settings.kafka.bootstrap_servers)]
        if plan.project.loaded.origins.get("s3.endpoint_url", "").startswith("--"):
            common += ["--s3-endpoint-url", str(plan.settings.s3.endpoint_url)]
        commands: dict[str, list[str]] = {}
        for stage, count in plan.workers.items():
            for number in range(1, count + 1):
                name = f"worker/{stage}/{number}"
                commands[name] = ["process", stage, "--component", name]
        if plan.workers:
            commands["statistics"] = ["process", "statistics"]
        for trainer in plan.trainers:
            ranks = plan.ranks[trainer.name]
            commands[f"trainer/{trainer.name}"] = [
                "train",
                trainer.name,
                *(["--nproc-per-node", str(ranks)] if ranks else []),
            ]
        for evaluation in plan.evaluations:
            commands[f"evaluator/{evaluation.name}"] = ["evaluate", evaluation.name]
        return [
            Child(
                name=name,
                arguments=[*arguments, *common],
                log_path=self.folder / "logs" / f"{name.replace('/', '.')}.log",
                lifeline=lifeline,
                ended=self._ended,
            )
            for name, arguments in commands.items()
        ]

    def _restart_services(self) -> Callable[[], Awaitable[Sequence[str]]] | None:
        kafka, s3 = self.plan.settings.kafka.bootstrap_servers is None, self.plan.settings.s3.endpoint_url is None
        if not kafka and not s3:
            return None

        async def restart() -> Sequence[str]:
            return await services.restart_dead(self.plan.project.state_dir)

        return restart

    def _ended(self, name: str, status: int) -> None:
        self.restarts[name] = self.restarts.get(name, 0) + 1
        self.report.event("ended", component=name, status=status)

    def _service_restarted(self, name: str) -> None:
        self.restarts[name] = self.restarts.get(name, 0) + 1
        self.report.event("service_restarted", service=name)

    def _waiting(self, part: str) -> None:
        if self._waited:
            self._part(self._waited)
        self._waited = part
        self.report.event("waiting", part=part)

    async def _publish(self, connection: Connection) -> None:
        sources = self.plan.sources
        if not sources:
            return
        made = await publish(
            connection.bus,
            sources,
            dataset=self.plan.settings.publish.dataset,
            producer=self.plan.settings.publish.producer,
            skip_bad=True,
            rejects=self.folder / "rejects.jsonl",
        )
        self.summary.conversations_published = made.published
        self.summary.already_published = made.already_published
        self.summary.publish_rejected = made.rejected
        self.report.event(
            "published",
            conversations_published=made.published,
            already_published=made.already_published,
            rejected=made.rejected,
        )
        self._part("publish")

    async def _unless_over(self, work: Coroutine[object, object, T], supervisor: Supervisor | None = None) -> T | None:
        """What the work gives; None when the run is told to stop first, and the error of a component beyond help."""
        working = asyncio.create_task(work)
        over = {asyncio.create_task(self.stop.wait())}
        if supervisor is not None:
            over.add(asyncio.create_task(supervisor.failed()))  # type: ignore[arg-type]
        try:
            done, _ = await asyncio.wait({working, *over}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working}:
                task.result()
            return working.result() if working in done else None
        finally:
            for task in (working, *over):
                task.cancel()
            await asyncio.gather(working, *over, return_exceptions=True)

    async def _until(self, settled: Settled, supervisor: Supervisor, connection: Connection) -> None:
        """Until settled, a signal, or a failure beyond help."""
        waits = {asyncio.create_task(self.stop.wait()), asyncio.create_task(supervisor.failed())}
        watching = asyncio.create_task(self._watch(connection))
        settling = asyncio.create_task(settled.wait()) if self.plan.until_idle else None
        try:
            done, _ = await asyncio.wait(
                waits | ({settling} if settling else set()), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            if settling is not None and settling.done():
                await self._statistics_counted(connection)
                self.report.event("idle")
        finally:
            if self._waited:
                self._part(self._waited)
                self._waited = ""
            for task in (*waits, watching, *((settling,) if settling else ())):
                task.cancel()
            await asyncio.gather(*waits, watching, return_exceptions=True)

    async def _statistics_counted(self, connection: Connection) -> None:
        """The served statistics lag a little: they are worth a short wait, not a long one."""
        follower = Follower(group="megaflow.statistics", topics=["processing.statistics"])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STATISTICS_SECONDS):
                while any(lag.records for lag in await measure(connection.bus, [follower])):
                    await asyncio.sleep(0.3)

    async def _watch(self, connection: Connection) -> None:
        """Shows the components and their lag, and each new checkpoint and evaluation."""
        bus = connection.bus
        seen: dict[str, dict[TopicPartition, int]] = {}
        followers = [Follower(group=p.group, topics=[p.source]) for p in self.plan.processors]
        while True:
            await asyncio.sleep(_STATUS_SECONDS)
            try:
                components = {n: s for n, s in (await read_status(bus)).items() if s.get("state") != "stopped"}
                lags: dict[str, int] = {}
                for lag in await measure(bus, followers):
                    lags[lag.group] = lags.get(lag.group, 0) + lag.records
                self.report.status(components, lags)
                for topic in ("checkpoints", "evaluations"):
                    if topic not in seen:
                        seen[topic] = await bus.end_offsets(await bus.partitions(topic))
                    async for record in scan(bus, topic, begin=seen[topic]):
                        self._told(topic.removesuffix("s"), orjson.loads(record.value or b"{}"))
                        seen[topic] = dict.fromkeys(seen[topic], record.offset + 1)
            except MegaflowError as error:
                log.info("the components cannot be seen now: %s", error)

    def _told(self, name: str, value: dict[str, object]) -> None:
        if name == "evaluation":
            value["promoted"] = ", promoted" if value.get("best") else ""
        self.report.event(name, **value)

    async def _step(self, connection: Connection, job: str) -> int:
        from megaflow_stream.checkpoint.head import head

        top = await head(connection.store, job)
        return top.step if top else 0

    async def _summarise(self, connection: Connection, mark: Mark, before: dict[str, int]) -> None:
        s, bus, store = self.summary, connection.bus, connection.store
        await summary.processed(bus, mark, s)
        await summary.evaluated(bus, mark, s)
        validation: list[tuple[int, float]] = []
        async for value in _values(bus, "evaluations"):
            if value["validation_loss"] is not None:
                validation.append((value["step"], value["validation_loss"]))
        curve: list[Step] = []
        for trainer in self.plan.trainers:
            curve = await steps(store, trainer.name, before[trainer.name])
            s.steps += len(curve)
            s.tokens += sum(step.tokens for step in curve)
            last = await alias.get(store, trainer.name, "best")
            s.promoted_checkpoint = last.ref.manifest if last else None
        if curve:
            s.first_loss, s.last_loss = curve[0].loss, curve[-1].loss
            seconds = sum(step.seconds for step in curve)
            s.tokens_per_second = round(s.tokens / seconds, 1) if seconds else None
            plot_png(curve, validation, self.folder / "loss.png")
            (self.folder / "loss.txt").write_text(plot_text(curve) + "\n")
        async for value in _values(bus, "checkpoints", mark):
            s.checkpoints += 1
            s.last_checkpoint = value["manifest"]
        s.restarts = self.restarts


async def _values(bus: Bus, topic: str, mark: Mark | None = None) -> AsyncIterator[dict[str, Any]]:
    async for record in scan(bus, topic, begin=mark.ends[topic] if mark else None):
        yield orjson.loads(record.value or b"{}")


def loss_plot(folder: str) -> str:
    """The curve that a run left as text, empty where it trained nothing."""
    path = Path(folder) / "loss.txt"
    return path.read_text().rstrip() if path.is_file() else ""
