"""The processes of a run: all started, all watched, all ended.

A child that ends is started again (`child`); an embedded service that ends is started again on its data. Whatever
happens to the supervisor, its children end: they hold a lifeline to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from megaflow_stream.runtime.child import Child

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0
_SERVICE_SECONDS = 1.0


class Supervisor:
    """Runs children until `stop`.

    restart_services: starts again what has died of the embedded services, and returns their names.
    """

    def __init__(
        self,
        children: Sequence[Child],
        restart_services: Callable[[], Awaitable[Sequence[str]]] | None,
        service_restarted: Callable[[str], None],
    ) -> None:
        self.children, self.restart_services = children, restart_services
        self.service_restarted = service_restarted
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(child.run(), name=child.name) for child in self.children]
        if self.restart_services is not None:
            self._tasks.append(asyncio.create_task(self._services(self.restart_services), name="services"))

    async def _services(self, restart: Callable[[], Awaitable[Sequence[str]]]) -> None:
        while True:
            await asyncio.sleep(_SERVICE_SECONDS)
            for name in await restart():
                log.warning("%s had died: it is up again on the same data", name)
                self.service_restarted(name)

    async def failed(self) -> None:
        """Returns never, or raises the error of the first child that is beyond help."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await asyncio.Event().wait()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to all, then SIGKILL to what is left."""
        for task in self._tasks:
            if task.get_name() == "services":
                task.cancel()
        for child in self.children:
            child.stop()
        alive = [child.process.wait() for child in self.children if child.alive and child.process is not None]
        if alive:
            await asyncio.wait([asyncio.ensure_future(wait) for wait in alive], timeout=seconds)
        for child in self.children:
            if child.alive:
                log.warning("%s did not end within %.0f s: killed", child.name, seconds)
            child.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
