"""The compute process of a worker: reads batches on stdin, calls handlers, answers on stdout.

It never sees Kafka, shares no GIL with the worker's heartbeats, and may be killed at any time. It ends when its
stdin does, that is when its worker is gone. Its one argument is JSON: see `Work`.

    stdin ── a thread reads ahead ──▶ the main thread calls the handler ──▶ a thread writes ── stdout

A pipe holds 1 MiB and a batch some: without the threads the handler would wait for the worker's event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from megaflow_stream.allocator import keep_freed_memory
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.processor import Handler, Processor
from megaflow_stream.errors import NotFound
from megaflow_stream.faults import reach
from megaflow_stream.processing.frames import DONE, HEAD, RAISED, answer_of, decode_batch, pack


@dataclass(frozen=True, kw_only=True)
class Work:
    """A processor's declaration, by file and name, and the partitions of the topics that it writes by key."""

    path: str
    name: str
    partitions: dict[str, int]

    def load(self) -> Processor:
        for processor in definitions(Path(self.path), Processor):
            if processor.name == self.name:
                return processor
        raise NotFound(f"no processor {self.name} is declared", file=self.path)


def _read(source: Any, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = source.readinto(view[at:])
        if not got:
            os._exit(0)  # the worker is gone
        at += got
    return data


def _write(sink: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[sink.write(view) :]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a group's SIGTERM is for the worker, which then ends us
    keep_freed_memory()
    pa.set_cpu_count(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    out, source = os.dup(1), os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(2, 1)  # a handler's print must not break the frames
    sink = os.fdopen(out, "wb", buffering=0)
    works = [Work(**raw) for raw in json.loads(sys.argv[1])]
    made: list[tuple[Processor, Handler, dict[str, int]]] = []
    for work in works:
        try:
            processor = work.load()
            made.append((processor, processor.build(), work.partitions))
        except Exception as error:
            traceback.print_exc()
            text = f"the handler of processor {work.name} cannot be built: {type(error).__name__}: {error}".encode(
                errors="replace"
            )
            _write(sink, HEAD.pack(RAISED, len(text)) + text)
            sys.exit(1)
    _write(sink, HEAD.pack(DONE, 0))  # ready: only now may the clock of a request run
    asked: queue.SimpleQueue[tuple[int, bytearray]] = queue.SimpleQueue()  # the worker sends two at the most
    made_ready: queue.Queue[bytes] = queue.Queue()
    threading.excepthook = _end
    threading.Thread(target=_read_ahead, args=(source, asked), daemon=True).start()
    threading.Thread(target=_write_behind, args=(sink, made_ready), daemon=True).start()
    while True:
        number, request = asked.get()
        batch = decode_batch(pa.py_buffer(request))
        processor, handler, partitions = made[number]
        if batch.num_rows == 1:  # tried alone: what was answered before must not be blamed if it kills the process
            made_ready.join()
        reach("compute.before_handler", processor=processor.name)
        try:
            status, data = DONE, pack(answer_of(processor, handler(batch), partitions))
        except Exception as error:
            status, data = RAISED, f"{type(error).__name__}: {error}".encode(errors="replace")
        made_ready.put(HEAD.pack(status, len(data)))
        made_ready.put(data)
        if batch.num_rows == 1:  # tried alone: it must not be blamed for what kills the process after it
            made_ready.join()


def _end(failed: threading.ExceptHookArgs) -> None:
    """A thread that is gone would leave the others, and the worker, waiting."""
    traceback.print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    os._exit(1)


def _read_ahead(source: Any, asked: queue.SimpleQueue[tuple[int, bytearray]]) -> None:
    while True:
        number, size = HEAD.unpack(_read(source, HEAD.size))
        asked.put((number, _read(source, size)))


def _write_behind(sink: Any, made_ready: queue.Queue[bytes]) -> None:
    while True:
        try:
            _write(sink, made_ready.get())
        except OSError:
            os._exit(0)  # the worker is gone
        made_ready.task_done()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # at the first word already
        main()
