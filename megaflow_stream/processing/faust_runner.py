"""Runs the statistics agent in Faust: a table, its changelog, and a consumer group of one.

Faust gives the table with its recovery, and batches by `noack_take`, acknowledged only after `StatisticsAgent.take`.
What is worked around: its consumer reads aborted records unless the app is "exactly once", whose faults are many, so
only the consumer's isolation is set here; records that came before a table was restored are lost, so none comes then;
an agent's error starts the agent again and may leave exit code 0, so it is caught and ends the process; a stop that
does not end is cut, which loses nothing.

    python -m megaflow_stream.processing.faust_runner BOOTSTRAP_SERVERS
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import Any, NoReturn

import faust
from faust.transport.drivers import aiokafka as driver

from megaflow_stream import logs
from megaflow_stream.bus import Bus, connect
from megaflow_stream.bus.failure import calm
from megaflow_stream.bus.security import Security
from megaflow_stream.errors import MegaflowError, SettingError
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.processing.statistics_agent import Arrived, StatisticsAgent, StatisticsTopics

log = logging.getLogger(__name__)

BATCH_RECORDS = 1000
BATCH_SECONDS = 0.1
STOP_SECONDS = 4.0
RESTORE_SECONDS = 60.0
EXIT_SECONDS = 9.0  # after SIGTERM, whatever hangs


class _ConsumerThread(driver.AIOKafkaConsumerThread):
    """Faust's consumer, read_committed, and calm while no broker answers."""

    logger = driver.logger

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        if getattr(consumer, "_isolation_level", None) != "read_uncommitted":
            raise SettingError(
                "Faust's consumer cannot be made read_committed",
                hint="install the versions of faust-streaming and aiokafka that megaflow-stream asks for",
            )
        consumer._isolation_level = "read_committed"
        calm(consumer._client)
        return consumer

    async def _fetch_records(
        self,
        consumer: Any,
        active_partitions: set[Any],
        timeout: float | None = None,
        max_records: int | None = None,
    ) -> dict[Any, list[Any]]:
        """The next records of the active partitions; the position of every other one stays where it is.

        Faust drops what comes from the others and does not go back, and when none is active aiokafka gives all.
        """
        found = await super()._fetch_records(consumer, active_partitions, timeout, max_records)
        active = set(active_partitions) if self.consumer.flow_active else set()
        for partition in found.keys() - active:
            consumer.seek(partition, found[partition][0].offset)
        return {partition: records for partition, records in found.items() if partition in active}


class _Consumer(driver.Consumer):
    """Faust's consumer, which loses no record when a table has been restored, and commits past transaction markers.

    Faust lets the partitions be read, seeks them to what was committed, and then resumes the flow, which empties the
    queue of the agent: what had come into it by then would be gone. So they are read from the last step on.
    """

    logger = driver.logger

    def _reset_state(self) -> None:
        super()._reset_state()
        self._resuming: set[Any] = set()

    def pause_partitions(self, tps: Any) -> None:
        self._resuming -= set(tps)
        super().pause_partitions(tps)

    def resume_partitions(self, tps: Any) -> None:
        self._resuming |= set(tps)

    def resume_flow(self) -> None:
        super().resume_partitions(self._resuming)
        self._resuming = set()
        super().resume_flow()

    def _new_offset(self, tp: Any) -> int | None:
        """The next offset to commit: past the last acknowledged one, for the agent acknowledges in order.

        Faust 0.15 counts an offset after a transaction marker twice, and then commits one transaction an interval.
        """
        acked = self._acked[tp]
        if not acked:
            return None
        offset: int = max(acked) + 1
        acked.clear()
        self._acked_index[tp].clear()
        self._gap.pop(tp, None)
        return offset

    def _new_consumer_thread(self) -> Any:
        return _ConsumerThread(self, loop=self.loop, beacon=self.beacon)


class _Transport(driver.Transport):
    Consumer = _Consumer


def statistics_app(bootstrap_servers: str, security: Security, app_id: str, folder: str) -> Any:
    """A Faust app, read_committed, without web server, leader topic and exactly-once; `folder` is for its files."""
    app = faust.App(
        app_id,
        broker=";".join(f"kafka://{server.strip()}" for server in bootstrap_servers.split(",")),
        broker_credentials=_credentials(security),
        autodiscover=False,
        datadir=folder,
        store="memory://",
        key_serializer="raw",
        value_serializer="raw",
        topic_partitions=1,
        topic_replication_factor=1,
        topic_disable_leader=True,
        web_enabled=False,
        producer_acks=-1,
        consumer_auto_offset_reset="earliest",
        # A static member: one that starts again takes its dead predecessor's place at once, instead of waiting
        # until its session has timed out.
        consumer_group_instance_id=app_id,
        broker_session_timeout=10.0,
        broker_heartbeat_interval=3.0,
        broker_commit_interval=0.5,
        stream_wait_empty=False,
    )
    app.transport = _Transport(app.conf.broker_consumer, app)
    return app


def _credentials(security: Security) -> Any:
    context = security.client_options().get("ssl_context")
    if security.protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=security.username,
            password=security.password,
            mechanism=security.mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context=context) if context is not None else None


async def run_statistics(
    bootstrap_servers: str,
    security: Security,
    stop: asyncio.Event,
    *,
    topics: StatisticsTopics | None = None,
) -> None:
    """Runs the agent until `stop` is set. Raises what the agent could not get over; `ServiceUnreachable` without a
    broker, `NotFound` without the topics."""
    topics = topics or StatisticsTopics()
    bus = await connect(bootstrap_servers, security=security, client_id=topics.app)
    try:
        partitions = len(await bus.partitions(topics.source))
        await bus.partitions(topics.served)
        with tempfile.TemporaryDirectory(prefix="megaflow-faust-") as folder:
            async with StatusWriter(bus, "statistics", "statistics", topics.status, topics.events) as status:
                app = statistics_app(bootstrap_servers, security, topics.app, folder)
                await _run_app(app, bus, topics, partitions, status, stop)
    finally:
        await bus.close()


async def _run_app(
    app: Any, bus: Bus, topics: StatisticsTopics, partitions: int, status: StatusWriter, stop: asyncio.Event
) -> None:
    # By the key's own partition: one member reads all, and `noack_take` knows no current event.
    table = app.Table("totals", partitions=1, use_partitioner=True)
    agent = StatisticsAgent(bus, topics, table, lambda: app.producer.flush(), status)
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def statistics(stream: Any) -> None:
        try:
            async for events in stream.noack_take(BATCH_RECORDS, within=BATCH_SECONDS):
                await agent.take([_arrived(event) for event in events])
                for event in events:
                    event.ack()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not failed.done():
                failed.set_exception(error)
            await asyncio.Event().wait()  # Faust would start the agent again

    restored: asyncio.TimerHandle | None = None

    def restoring() -> None:
        if app.in_recovery and not failed.done():
            failed.set_exception(
                MegaflowError(
                    f"restoring the statistics from their changelog did not end in {RESTORE_SECONDS:.0f} s",
                    hint="what is served is kept in the topic of statistics: the changelog may be deleted",
                    topic=table.changelog_topic_name,
                )
            )

    async def assigned(*_: object, **__: object) -> None:
        nonlocal restored
        agent.assigned()
        if restored is not None:
            restored.cancel()
        # Faust logs an error of its recovery as a warning, and then waits for ever.
        restored = asyncio.get_running_loop().call_later(RESTORE_SECONDS, restoring)
        await status.update("idle")

    app.on_partitions_assigned.connect(assigned)
    app.agent(app.topic(topics.source, partitions=partitions, internal=False), concurrency=1, name="statistics")(
        statistics
    )
    ended: asyncio.Future[Any] = asyncio.ensure_future(_first(stop, failed))
    starting: asyncio.Future[Any] = asyncio.ensure_future(app.start())
    try:
        await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await app.wait_for_stopped(ended)
        if failed.done():
            failed.result()
        if app.crash_reason is not None:
            raise app.crash_reason
        if not stop.is_set():
            raise MegaflowError("the statistics agent: Faust stopped by itself")
        await status.update("stopping")
    finally:
        ended.cancel()
        if restored is not None:
            restored.cancel()
        await asyncio.gather(_stop(app, starting), agent.close())


async def _first(stop: asyncio.Event, failed: asyncio.Future[None]) -> None:
    """Returns when `stop` is set or `failed` is done."""
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([stopping, failed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


async def _stop(app: Any, starting: asyncio.Future[None]) -> None:
    """Stops Faust, or gives up on it: what it has not committed comes again, and changes nothing."""
    stopping = asyncio.ensure_future(app.stop())
    _, late = await asyncio.wait([stopping], timeout=STOP_SECONDS)
    for task in (*late, starting):
        task.cancel()
    if late:
        log.warning("Faust did not stop in %.0f s and is left: the broker may be down", STOP_SECONDS)
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await asyncio.wait_for(asyncio.gather(stopping, starting, return_exceptions=True), 0.5)


def _arrived(event: Any) -> Arrived:
    message = event.message
    headers = message.headers or ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return Arrived(message.partition, message.offset, message.key, message.value, list(pairs))


def main(bootstrap_servers: str, security: Security, *, topics: StatisticsTopics | None = None) -> NoReturn:
    """Runs the agent as this whole process, until SIGTERM or SIGINT; then ends within 10 s, whatever the broker does.

    Called in the main thread: elsewhere no signal can be taken, and one ends the process at once. A caller that has an
    event loop, its own signals or something to release awaits `run_statistics` instead.

    Ends the process itself, since threads of Faust's may hang: 0 after SIGTERM, 130 after SIGINT, else the exit code
    of the error, whose message is the last line on stderr.
    """
    logs.setup("statistics")
    code = 0

    def end() -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def on_signal(number: int, frame: object) -> None:
            nonlocal code
            code = 130 if number == signal.SIGINT else 0
            late = threading.Timer(EXIT_SECONDS, end)
            late.daemon = True
            late.start()
            loop.call_soon_threadsafe(stop.set)

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, on_signal)
        await run_statistics(bootstrap_servers, security, stop, topics=topics)

    try:
        asyncio.run(run())
    except MegaflowError as error:
        code = code or error.exit_code
        print(f"{error.hint}\nmegaflow: {error}" if error.hint else f"megaflow: {error}", file=sys.stderr)
    except BaseException as error:
        code = code or 1
        log.error("the statistics agent failed", exc_info=error)
        print(f"megaflow: the statistics agent failed: {type(error).__name__}: {error}", file=sys.stderr)
    end()


if __name__ == "__main__":
    main(sys.argv[1], Security())
