"""The processes of a run: all started, all watched, all ended.

A child that ends is started again (`child`); an embedded service that ends is started again on its data. Whatever
happens to the supervisor, its children end: they hold a lifeline to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence

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
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())

    def watch_services(self) -> None:
        """From now on, before any child: publishing needs them too."""
        if self.restart_services is not None:
            self._keep(self._services(self.restart_services), "services")

    def start(self) -> None:
        for child in self.children:
            self._keep(child.run(), child.name)

    def _keep(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _services(self, restart: Callable[[], Awaitable[Sequence[str]]]) -> None:
        while True:
            await asyncio.sleep(_SERVICE_SECONDS)
            for name in await restart():
                log.warning("%s had died: it is up again on the same data", name)
                self.service_restarted(name)

    async def failed(self) -> None:
        """Returns never, or raises the error of the first child that is beyond help."""
        await asyncio.shield(self._failure)

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
