"""`megaflow run`: the whole pipeline.

services up ─▶ topics applied ─▶ children started, input published ─▶ settled, or a signal ─▶ stopped ─▶ summary
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import orjson

from megaflow_stream.config.settings import Settings
from megaflow_stream.conversations.files import sources
from megaflow_stream.definitions.processor import Processor
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import MegaflowError, UsageError
from megaflow_stream.observe.follow import Following
from megaflow_stream.observe.lag import Follower, measure
from megaflow_stream.observe.status import StatusWriter, read_status
from megaflow_stream.project import topics as declared
from megaflow_stream.project.check import check, workers
from megaflow_stream.project.folder import Project
from megaflow_stream.project.readers import followers
from megaflow_stream.publishing.publish import publish
from megaflow_stream.runtime import services, summary
from megaflow_stream.runtime.child import Child, never
from megaflow_stream.runtime.connection import Connection, connected
from megaflow_stream.runtime.curve import Totals, totals
from megaflow_stream.runtime.lifeline import Lifeline
from megaflow_stream.runtime.report import Report, about_input
from megaflow_stream.runtime.settled import Settled
from megaflow_stream.runtime.summary import Mark, Summary
from megaflow_stream.runtime.supervisor import Supervisor

log = logging.getLogger(__name__)

_STATUS_SECONDS = 1.0
_MARKED = ("processing.statistics", "conversations.dropped", "dlq", "checkpoints", "evaluations")
_STATISTICS_SECONDS = 10.0
_LAST_LOOK_SECONDS = 5.0  # after a failure: the services may be what failed
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
    """Loads every definition and checks it. Raises `SettingError`, and `UsageError` for an input that is not there:
    nothing has been started then."""
    sources(inputs)
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


@contextlib.contextmanager
def alone(state_dir: Path) -> Iterator[None]:
    """One run a project: two would train the same job side by side. The kernel frees the lock when the run dies."""
    with (state_dir / "run.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UsageError(
                f"this project runs already, as process {lock.read().strip() or '?'}",
                hint="`megaflow status` shows how it is; `megaflow publish` gives it more to do",
                file=lock.name,
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


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
        """The summary, also left in the run's folder. After an error `summary` has what is known, and the error."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with alone(self.plan.project.state_dir):
                await self._run()
        except Exception as error:
            ours = isinstance(error, MegaflowError)
            self.summary.error = str(error) if ours else f"unexpected {type(error).__name__}: {error}"
            raise
        finally:
            self.summary.restarts = self.restarts
            self.summary.seconds["total"] = round(time.monotonic() - self.begun, 1)
            with contextlib.suppress(OSError):  # it is printed, too
                (self.folder / "summary.json").write_text(json.dumps(self.summary.to_json(), default=str, indent=2))
        return self.summary

    async def _run(self) -> None:
        for note in self.plan.notes:
            self.report.event("warning", note=note)
        async with contextlib.AsyncExitStack() as stack:
            # A first start may take minutes: Ctrl-C ends it.
            begin = stack.enter_async_context(connected(self.plan.project, self.plan.settings))
            connection = await self._unless_over(begin)
            if connection is None:
                return
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
                mark = await Mark.now(connection.bus, _MARKED)
                before = {t.name: await totals(connection.store, t.name) for t in self.plan.trainers}
                try:
                    await self._with(connection, status, mark)
                finally:
                    await self._look_back(connection, mark, before)
                self._part("summary")
            self.part_at = time.monotonic()
        self._part("services down")

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

    async def _with(self, connection: Connection, status: StatusWriter, mark: Mark) -> None:
        plan, bus = self.plan, connection.bus
        await status.update("running")
        settled = Settled(bus, plan.processors, plan.trainers, plan.evaluations, self._waiting)
        with Lifeline() as lifeline:
            supervisor = Supervisor(
                self._children(lifeline, settled),
                self._restart_services(connection.endpoints.stops),
                self._service_restarted,
            )
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
                    await self._until(settled, supervisor, connection, mark)
            finally:
                self._part("running")
                self.report.event("stopping")
                await status.update("stopping")
                await supervisor.stop()
                self._part("stopping")

    def _children(self, lifeline: Lifeline, settled: Settled) -> list[Child]:
        plan = self.plan
        finishing = {f"trainer/{trainer.name}": partial(settled.reached, trainer) for trainer in plan.trainers}
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
                finished=finishing.get(name, never),
            )
            for name, arguments in commands.items()
        ]

    def _restart_services(self, stops: int) -> Callable[[], Awaitable[Sequence[str]]] | None:
        kafka, s3 = self.plan.settings.kafka.bootstrap_servers is None, self.plan.settings.s3.endpoint_url is None
        if not kafka and not s3:
            return None

        async def restart() -> Sequence[str]:
            return await services.restart_dead(self.plan.project.state_dir, self.plan.settings, stops=stops)

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
        for note in about_input(made, self.plan.inputs):
            self.report.event("input", note=note)
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

    async def _until(self, settled: Settled, supervisor: Supervisor, connection: Connection, mark: Mark) -> None:
        """Until settled, a signal, or a failure beyond help."""
        waits = {asyncio.create_task(self.stop.wait()), asyncio.create_task(supervisor.failed())}
        watching = asyncio.create_task(self._watch(connection, mark))
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

    async def _watch(self, connection: Connection, mark: Mark) -> None:
        """Shows the components and their lag, and each new checkpoint and evaluation."""
        bus = connection.bus
        news = [Following(bus, topic, mark.ends[topic]) for topic in ("checkpoints", "evaluations")]
        readers = followers(self.plan.project)
        while True:
            await asyncio.sleep(_STATUS_SECONDS)
            try:
                components = {n: s for n, s in (await read_status(bus)).items() if s.get("state") != "stopped"}
                lags: dict[str, int] = {}
                for lag in await measure(bus, readers):
                    lags[lag.group] = lags.get(lag.group, 0) + lag.records
                self.report.status(components, lags)
                for following in news:
                    for record in await following.new():
                        self._told(following.topic.removesuffix("s"), orjson.loads(record.value or b"{}"))
            except MegaflowError as error:
                log.info("the components cannot be seen now: %s", error)

    def _told(self, name: str, value: dict[str, object]) -> None:
        if name == "evaluation":
            value["promoted"] = ", promoted" if value.get("best") else ""
        self.report.event(name, **value)

    async def _look_back(self, connection: Connection, mark: Mark, before: Mapping[str, Totals]) -> None:
        """The summary; of a run that failed or was told to stop, what can be known of it soon."""
        if sys.exception() is None and not self.stop.is_set():
            await self._summarise(connection, mark, before)
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_LOOK_SECONDS):
                await self._summarise(connection, mark, before)

    async def _summarise(self, connection: Connection, mark: Mark, before: Mapping[str, Totals]) -> None:
        bus, plan = connection.bus, self.plan
        await summary.processed(bus, mark, self.summary)
        await summary.trained(bus, connection.store, mark, self.summary, plan.trainers, before, self.folder)
        await summary.evaluated(bus, connection.store, mark, self.summary, plan.evaluations)
