"""The keeper of a worker's compute process: sends batches, times them, starts the process again when it dies.

The clock of a request starts when it becomes the first in a process that has said it is ready, and is kept here, not
by the caller: a caller may be gone (its partition revoked) while its request hangs. It counts the process's CPU time,
so that a starved machine is not taken for a hang.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import psutil
import pyarrow as pa

from megaflow_stream.errors import MegaflowError, SettingError
from megaflow_stream.processing.compute_process import Work
from megaflow_stream.processing.frames import DONE, HEAD, RAISED, Answer, encode_batch, unpack

log = logging.getLogger(__name__)

_READY_SECONDS = 120.0  # imports on a starved machine
_WALL_FACTOR = 10  # wall seconds allowed for one CPU second of the limit
# A signal has stopped the process: it computes nothing, and the worker waits. Long enough for a Ctrl-Z taken back.
_FROZEN_SECONDS = 10.0
_PIPE_BYTES = 1 << 20
_DIED = 255  # in the place of a head's status


class HandlerRaised(MegaflowError):
    """The handler raised: the same batch would raise again."""


class HandlerDied(MegaflowError):
    """The compute process hung or died while this batch was its first."""


class HandlerNotStarted(MegaflowError):
    """No compute process gets ready: no record is to blame, and none can be processed."""


class Compute(Protocol):
    """Calls the handler of a processor, by its number in the worker."""

    async def call(self, number: int, batch: pa.RecordBatch, hang_seconds: float) -> Answer:
        """Raises `HandlerRaised`, `HandlerDied` when the process hung or died with this batch, `HandlerNotStarted` or
        `SettingError`, which no other batch can cure."""
        ...

    def cpu_seconds(self) -> float:
        """CPU used so far: what grows is slow, what does not is stuck."""
        ...

    async def close(self) -> None: ...


class _Again(Exception):
    """The process died of another's batch, or of none: this one just goes again."""


class _Frozen(Exception):
    """A signal has stopped the process: no batch is to blame."""


@dataclasses.dataclass(slots=True)
class _Request:
    future: asyncio.Future[tuple[int, bytes]]
    hang_seconds: float


class ProcessCompute:
    """See `Compute`. Two requests may be in the pipe, so that the process never waits for the worker."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._argument = json.dumps([dataclasses.asdict(work) for work in works])
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: collections.deque[_Request] = collections.deque()
        self._asked = asyncio.Event()
        self._slots, self._writing = asyncio.Semaphore(2), asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process, a few times if need be. Raises `SettingError` where a handler cannot be
        built, `HandlerNotStarted` where the process dies."""
        for wait_seconds in (0.1, 1.0, 5.0, None):
            process = await self._spawned()
            assert process.stdout is not None
            assert process.stdin is not None
            try:
                async with asyncio.timeout(_READY_SECONDS):
                    status, size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
                    said = (await process.stdout.readexactly(size)).decode(errors="replace")
            except (asyncio.IncompleteReadError, TimeoutError):
                _kill(process)
                status, said = _DIED, f"the compute process does not start (exit status {await process.wait()})"
            except BaseException:  # the caller is gone: nobody would know of this process
                await _end(process)
                raise
            if status == DONE:
                break
            _kill(process)
            if wait_seconds is None:
                hint = "what it wrote to stderr stands above"
                raise SettingError(said, hint=hint) if status == RAISED else HandlerNotStarted(said, hint=hint)
            log.warning("%s; it is started again in %g s", said, wait_seconds)
            await asyncio.sleep(wait_seconds)
        # A larger pipe keeps the process busy while the worker is in Kafka; shared memory gained nothing over it.
        for pipe in (0, 1):
            transport = process._transport.get_pipe_transport(pipe)  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):
                fcntl.fcntl(transport.get_extra_info("pipe").fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._process, self._waiting, self._asked = process, collections.deque(), asyncio.Event()
        self._reader = asyncio.create_task(self._read(process, self._waiting, self._asked))

    async def _spawned(self) -> asyncio.subprocess.Process:
        """A new process; none where the caller is cancelled meanwhile."""
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megaflow_stream.processing.compute_process",
                self._argument,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 24,
            )
        )
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            await _end(await spawning)
            raise

    async def warm(self) -> None:
        """Starts the process before the first batch waits for its imports."""
        async with self._writing:
            if self._process is None:
                await self.start()

    async def call(self, number: int, batch: pa.RecordBatch, hang_seconds: float) -> Answer:
        data = encode_batch(batch)
        while True:
            async with self._slots:
                async with self._writing:
                    if self._process is None:
                        await self.start()
                    process = self._process
                    assert process is not None
                    assert process.stdin is not None
                    request = _Request(asyncio.get_running_loop().create_future(), hang_seconds)
                    self._waiting.append(request)
                    self._asked.set()
                    with contextlib.suppress(OSError, RuntimeError):  # the reader sees the end
                        process.stdin.write(HEAD.pack(number, data.size))
                        process.stdin.write(memoryview(data))
                try:
                    status, answer = await request.future
                except _Again:
                    continue
                if status == DONE:
                    return unpack(answer)
                raise HandlerRaised(answer.decode(errors="replace"))

    async def _read(
        self,
        process: asyncio.subprocess.Process,
        waiting: collections.deque[_Request],
        asked: asyncio.Event,
    ) -> None:
        why, blamed = "the compute process died", 1
        try:
            while True:
                if not waiting:
                    asked.clear()
                    await asked.wait()
                answer = await self._timed(process, waiting[0].hang_seconds)
                request = waiting.popleft()
                if not request.future.done():
                    request.future.set_result(answer)
        except _Frozen:
            why, blamed = "the compute process was stopped by a signal", 0
        except TimeoutError:
            why = f"the handler hung for {waiting[0].hang_seconds:g} CPU seconds"
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            _kill(process)
            if self._process is process:
                self._process = None
            if waiting:
                log.warning("%s; it is started again", why)
            for place, request in enumerate(waiting):
                if not request.future.done():
                    # The first may be to blame, the others just go again.
                    request.future.set_exception(HandlerDied(why) if place < blamed else _Again())
                    request.future.exception()  # no complaint where nobody waits any more

    async def _timed(self, process: asyncio.subprocess.Process, hang_seconds: float) -> tuple[int, bytes]:
        """The next answer; TimeoutError when it has used its CPU seconds, or ten times that in wall seconds; `_Frozen`
        when the process is stopped."""
        assert process.stdout is not None
        reading = asyncio.ensure_future(_answer(process.stdout))
        begun = awake_at = time.monotonic()
        used = _cpu_seconds(process.pid)
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=min(1.0, hang_seconds / 4))
                if done:
                    return reading.result()
                now = time.monotonic()
                if not _is_stopped(process.pid):
                    awake_at = now
                elif now - awake_at > min(hang_seconds, _FROZEN_SECONDS):
                    raise _Frozen
                if _cpu_seconds(process.pid) - used > hang_seconds or now - begun > _WALL_FACTOR * hang_seconds:
                    raise TimeoutError
        finally:
            reading.cancel()

    def cpu_seconds(self) -> float:
        return _cpu_seconds(self._process.pid) if self._process else 0.0

    async def close(self) -> None:
        process = self._process  # the reader's end forgets it
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader], timeout=1)
        self._process = None
        if process is not None:
            await _end(process)


def _kill(process: asyncio.subprocess.Process) -> None:
    """By the pid, which is the process's until it is waited for: `Process.kill` would wait for a dead one itself."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill(process)
    await process.wait()
    process._transport.close()  # type: ignore[attr-defined]


async def _answer(pipe: asyncio.StreamReader) -> tuple[int, bytes]:
    status, size = HEAD.unpack(await pipe.readexactly(HEAD.size))
    return status, await pipe.readexactly(size)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
