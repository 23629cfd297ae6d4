"""What a component says about itself: JSON on the topics `status` (the latest of each) and `status.events` (all).

    async with StatusWriter(bus, "trainer/model_finetune/0", "trainer") as status:
        await status.update("running", step=7, loss=2.5)

A writer never slows or fails its component: it keeps the latest numbers and a bounded list of state changes, and a
task of its own writes them, again and again while no broker answers. Every `REPEAT_SECONDS` the latest is written
to `status` again, so that a component that died is told from one that has nothing new to say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from types import TracebackType
from typing import Any, Self

import orjson

from megaflow_stream.bus.api import Bus, Producer, json_headers
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.errors import MegaflowError, NotFound
from megaflow_stream.observe.scan import scan

STATES = frozenset({"starting", "running", "idle", "waiting", "stopping", "stopped", "failed"})
FINAL = frozenset({"stopped", "failed"})
KINDS = frozenset({"worker", "trainer", "evaluator", "statistics", "run", "service"})
EVERY_SECONDS = 1.0  # numbers of one state go out this often at most
REPEAT_SECONDS = 10.0
STALE_SECONDS = 35.0  # three repeats missed
DRIFT_SECONDS = 2.0  # a clock this far ahead of ours is reported
KEPT_CHANGES = 100
WRITE_SECONDS = 5.0
CLOSE_SECONDS = 2.0
_HEADERS = json_headers("megaflow.status/1")

log = logging.getLogger(__name__)


class StatusWriter:
    """Writes one component's status. `update` returns at once, whatever the broker does.

    component: unique in the project, for instance `worker/clean/1`; the key on `status`.
    kind: worker, trainer, evaluator, statistics, run or service.
    """

    def __init__(
        self,
        bus: Bus,
        component: str,
        kind: str,
        topic: str = "status",
        events: str = "status.events",
        *,
        clock: Clock | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of component; there are {', '.join(sorted(KINDS))}")
        self.bus, self.component, self.kind = bus, component, kind
        self.topic, self.events = topic, events
        self.clock = clock or SystemClock()
        self.state = ""
        self.lost = 0
        self._latest: dict[str, Any] = {}
        self._changes: deque[dict[str, Any]] = deque(maxlen=KEPT_CHANGES)
        self._numbers_due = False
        self._wake, self._closing = asyncio.Event(), asyncio.Event()
        self._producer: Producer | None = None
        self._task: asyncio.Task[None] | None = None
        self._reachable = True
        self._written_at = -1e9

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._write_on(), name=f"status of {self.component}")
        await self.update("starting")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            await self.close("failed", error=f"{type(error).__name__}: {error}"[:500])
        else:
            await self.close()

    async def update(self, state: str, **numbers: object) -> None:
        """The component's state and its figures now; figures given earlier stay until they are given again."""
        self.put(state, **numbers)

    def put(self, state: str, **numbers: object) -> None:
        """As `update`, from a thread without the loop, one thread at a time: only a change of state wakes the loop."""
        if state not in STATES:
            raise ValueError(f"{state!r} is no state; there are {', '.join(sorted(STATES))}")
        changed = state != self.state
        self.state = state
        self._latest = {
            **self._latest,
            **numbers,
            "component": self.component,
            "kind": self.kind,
            "state": state,
            "at_ms": int(self.clock.now() * 1000),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        if changed:
            self.lost += len(self._changes) == KEPT_CHANGES
            self._changes.append(self._latest)
            self._numbers_due = False
            self._loop.call_soon_threadsafe(self._wake.set)
        else:
            self._numbers_due = True

    async def close(self, state: str = "", **numbers: object) -> None:
        """The last status, `stopped` where none is given; ends within a few seconds, whatever the broker does."""
        if self.state not in FINAL:
            await self.update(state or "stopped", **numbers)
        task, self._task = self._task, None
        if task is None:
            return
        self._closing.set()
        _, late = await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        if late:
            task.cancel()
            await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        if self._changes:
            log.warning("the last status of %s was not written: no broker answers", self.component)
        await self._drop_producer()

    async def _write_on(self) -> None:
        """Writes what is due until closed; with a broker that does not answer, once in a while."""
        pause = EVERY_SECONDS
        while True:
            await self._wait(pause)
            closing = self._closing.is_set()
            due = self._numbers_due or bool(self._changes)
            if due or self.clock.monotonic() - self._written_at >= REPEAT_SECONDS:
                try:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await self._write()
                except (MegaflowError, OSError, TimeoutError) as error:
                    await self._drop_producer()
                    pause = min(pause * 2, REPEAT_SECONDS)
                    if self._reachable:
                        self._reachable = False
                        log.warning("status cannot be written, trying on: %s", str(error) or type(error).__name__)
                else:
                    pause = EVERY_SECONDS
                    if not self._reachable:
                        self._reachable = True
                        log.warning("status is written again")
            if closing:
                return

    async def _wait(self, seconds: float) -> None:
        """Until a state change or for `seconds`; after a failure for `seconds`; never longer than until closed."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._closing.wait()),
            asyncio.ensure_future(self.clock.sleep(seconds)),
        ]
        if self._reachable:
            waits.append(asyncio.ensure_future(self._wake.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self._wake.clear()

    async def _write(self) -> None:
        """State changes in their order, then the newest numbers. What fails stays to be written."""
        if self._producer is None:
            self._producer = await self.bus.producer()
        changes, numbers = list(self._changes), self._numbers_due
        if numbers:
            self._numbers_due = False
        latest = self._latest
        if self.state not in FINAL:  # a repeat says: alive now
            latest = {**latest, "at_ms": int(self.clock.now() * 1000)}
        documents = [*changes, latest] if numbers else changes
        if self.lost and documents:
            documents[-1] = {**documents[-1], "changes_lost": self.lost}
        sent = []
        key = self.component.encode()
        try:
            for document in documents:
                value = orjson.dumps(document, default=str)
                sent.append(await self._producer.send(self.events, value, key=key, headers=_HEADERS))
            value = orjson.dumps(documents[-1] if documents else latest, default=str)
            sent.append(await self._producer.send(self.topic, value, key=key, headers=_HEADERS))
            await asyncio.gather(*sent)
        except BaseException:
            self._numbers_due = self._numbers_due or numbers
            for future in sent:
                future.add_done_callback(lambda f: f.cancelled() or f.exception())
            raise
        for change in changes:
            if self._changes and self._changes[0] is change:
                self._changes.popleft()
        self._written_at = self.clock.monotonic()

    async def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                await asyncio.wait_for(producer.close(), CLOSE_SECONDS)
            except (MegaflowError, OSError, TimeoutError):
                log.debug("a producer of status did not close")


async def read_status(bus: Bus, *, topic: str = "status", clock: Clock | None = None) -> dict[str, dict[str, Any]]:
    """The latest status of each component, sorted by its name.

    Added to what the component wrote: `age_seconds` (0 at least, also when its clock is ahead of ours), `stale` (it
    has neither ended nor been heard for `STALE_SECONDS`), and `clock_ahead_seconds` where its clock is ahead by more
    than `DRIFT_SECONDS`. Empty where the topic is not there yet.
    """
    now = (clock or SystemClock()).now()
    found: dict[str, dict[str, Any]] = {}
    try:
        async for record in scan(bus, topic):
            component = (record.key or b"").decode("utf-8", "replace")
            if record.value is None:
                found.pop(component, None)
                continue
            try:
                document = orjson.loads(record.value)
            except orjson.JSONDecodeError:
                continue
            if isinstance(document, dict):
                found[component] = document
    except NotFound:
        return {}
    for document in found.values():
        at_ms = document.get("at_ms")
        age = now - at_ms / 1000 if isinstance(at_ms, (int, float)) else float("inf")
        document["age_seconds"] = max(0.0, round(age, 3)) if age != float("inf") else None
        document["stale"] = document.get("state") not in FINAL and age > STALE_SECONDS
        if age < -DRIFT_SECONDS:
            document["clock_ahead_seconds"] = round(-age, 3)
    return dict(sorted(found.items()))
