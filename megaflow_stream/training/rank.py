"""A rank as a process: `python -m megaflow_stream.training.rank`, orders on stdin, events as JSON lines on stdout.

stdin stays open: when it ends, the launcher is gone and the rank ends at once. SIGTERM: finish the step, a last
checkpoint, exit 0; a second one exits at once.

    1. Import, build the model (seeded, so alike on all ranks).
    2. Rank 0: fence older leaders, read the head and the plan; then open the store of the group. The others wait.
    3. Form the group, share the state, train.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import orjson

from megaflow_stream import logs
from megaflow_stream.allocator import keep_freed_memory
from megaflow_stream.errors import MegaflowError, NotFound, ServiceUnreachable
from megaflow_stream.faults import reach
from megaflow_stream.training.job import Job, Place, from_json
from megaflow_stream.training.progress import Phase, Progress

SERVICES_SECONDS = 60.0  # a rank that starts waits so long for Kafka and S3
GROUP_SECONDS = 300.0  # and so long for the others of its group

_BUILDING = threading.Lock()  # the seed is the whole process's, and tests run ranks as threads

Emit = Callable[[str, Mapping[str, Any]], None]
log = logging.getLogger(__name__)


def emit(event: str, numbers: Mapping[str, Any]) -> None:
    """One line on stdout, whole: the launcher reads it."""
    os.write(1, orjson.dumps({"event": event, **numbers}, default=str) + b"\n")


def watch_parent() -> None:
    """Ends the process when stdin does: whoever started it is gone."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def tokenizer_sha256(job: Job, path: str) -> str:
    """The hash that features must name. Raises `NotFound`."""
    file = job.root / path
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise NotFound(
            f"the tokenizer cannot be read: {error}", hint="`megaflow tokenizer train` makes it", file=file
        ) from error


@dataclass
class Stop:
    """Set by SIGTERM. A rank that is still being built has nothing to finish: it ends at once."""

    asked: bool = False
    building: bool = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.building:
            os._exit(0)
        if self.asked:
            os._exit(128 + number)
        self.asked = True


def main() -> None:
    job, place = from_json(sys.stdin.buffer.readline())
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher, which asks in order
    watch_parent()
    logs.setup(f"train {job.name} rank {place.rank}")
    keep_freed_memory()
    code = 1
    try:
        closing = ExitStack()
        train(job, place, stop, emit, closing)
        closing.close()  # not after an error: a client may wait long for a dead broker, and the others wait for us
        code = 0
    except MegaflowError as error:
        emit(
            "failed",
            {
                "rank": place.rank,
                "error": str(error),
                "kind": type(error).__name__,
                "hint": error.hint,
                "exit_code": error.exit_code,
                "final": not error.retriable,
            },
        )
        code = error.exit_code
    except BaseException as error:
        log.exception("rank %d failed", place.rank)
        text = f"{type(error).__name__}: {error}"
        emit(
            "failed", {"rank": place.rank, "error": text, "kind": type(error).__name__, "exit_code": 1, "final": False}
        )
    sys.stderr.flush()
    os._exit(code)  # threads of gloo and of clients that wait for a dead broker are not waited for


def train(job: Job, place: Place, stop: Stop, emit: Emit, closing: ExitStack) -> None:
    """The rank's work, in this process. Raises what ended it. closing: takes what is to be closed afterwards."""
    progress = Progress(place.sign_file)
    import torch
    import torch.optim  # imports torch._dynamo, for seconds: before any other rank waits
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from megaflow_stream.elastic.communicator import Communicator
    from megaflow_stream.training.alike import compare, describe
    from megaflow_stream.training.lead import Lead
    from megaflow_stream.training.loader import Loader
    from megaflow_stream.training.loop import Rank
    from megaflow_stream.training.plan import owner
    from megaflow_stream.training.restore import put_in, share

    trainer = job.trainer()
    torch.set_num_threads(trainer.threads_per_rank)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", place.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    with _BUILDING:
        torch.manual_seed(trainer.seed)
        model = trainer.build_model().to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainer.trainable(name))
    optimizer = trainer.build_optimizer((n, p) for n, p in model.named_parameters() if p.requires_grad)
    schedule = trainer.build_schedule(optimizer) if trainer.build_schedule is not None else None
    tokenizer = tokenizer_sha256(job, trainer.tokenizer)

    lead = None
    bound = timedelta(seconds=GROUP_SECONDS)
    if place.rank == 0:
        lead = Lead(job, trainer, tokenizer, emit, partial(reach, rank=place.rank, generation=place.generation))
        closing.callback(lead.close)
        lead.open(SERVICES_SECONDS)
        store = TCPStore("127.0.0.1", 0, None, True, bound, wait_for_workers=False)
        _write_whole(place.port_file, str(store.port))
    else:
        store = TCPStore("127.0.0.1", _port(place), None, False, bound, wait_for_workers=False)
    communicator = Communicator(
        store,
        generation=place.generation,
        rank=place.rank,
        world_size=place.world_size,
        device=device,
        # The launcher names a rank that is silent for `rank_timeout_seconds`; this bound is for when it cannot.
        timeout_seconds=2 * trainer.rank_timeout_seconds,
        alive=progress.again,
    )
    definition = hashlib.sha256(job.definition.read_bytes()).hexdigest()
    compare(communicator, describe(trainer, model, optimizer, schedule, definition))
    begin = share(communicator, lead.begin if lead is not None else None)
    put_in(begin, trainer, model, optimizer, schedule)
    partitions = sorted(begin.offsets)
    owners = {p: owner(i, len(partitions), place.world_size) for i, p in enumerate(partitions)}
    loader = Loader(
        lambda: job.bus(f"loader.{place.rank}"),
        {p: offset for p, offset in begin.offsets.items() if owners[p] == place.rank},
        tokenizer=tokenizer,
    )
    closing.callback(loader.close)
    rank = Rank(
        trainer=trainer,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        communicator=communicator,
        loader=loader,
        owners=owners,
        begin=begin,
        progress=progress,
        stopping=lambda: stop.asked,
        gated=bool(job.gates) and not job.replay,
        leader=lead.leader if lead is not None else None,
        checkpointer=lead.checkpointer if lead is not None else None,
        until_step=job.until_step,
        report=lead.report if lead is not None else lambda event, numbers: None,
    )
    stop.building = False
    step = rank.run()
    progress.sign(Phase.STOPPING, step)
    emit(
        "rank",
        {
            "rank": place.rank,
            "step": step,
            "fetched_bytes": loader.fetched_bytes,
            "trained_bytes": loader.claimed_bytes,
            "shipped_bytes": rank.exchange.shipped_bytes,
        },
    )
    if lead is not None:
        lead.say_stopped(rank)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def _port(place: Place) -> int:
    """The store's port, once rank 0 has opened it."""
    deadline = time.monotonic() + GROUP_SECONDS
    while not place.port_file.exists():
        if time.monotonic() > deadline:
            raise ServiceUnreachable(f"rank 0 did not open the group's store within {GROUP_SECONDS:g} s")
        time.sleep(0.02)
    return int(place.port_file.read_text())


if __name__ == "__main__":
    main()
