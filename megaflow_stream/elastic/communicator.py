"""Collectives of one generation of ranks: bounded, and never the default process group.

`init_process_group` and DDP hold one group for the life of a process, and cannot be remade after a failed start (the
prefix of its keys is a per-process counter). A `Communicator` is made for a generation (store, rank, world size) and
thrown away with it; its keys carry the generation, so that a newer one never reads an older one's.

Tensors are reduced on their device: gloo on a CPU, NCCL on CUDA (that path is chosen by the device; the tests here did
not run it). Bytes always travel by gloo. A peer that dies ends an operation at once with an error; one that is stopped
does not, so every wait is bounded, and reports while it waits that this rank itself is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from megaflow_stream.errors import MegaflowError

PIECE_BYTES = 64 << 20
INLINE_BYTES = 8 << 10  # of a message that travel with its length: one operation instead of two, each a wait for others
WAKE_SECONDS = 1.0  # how often a waiting rank says that it is alive


class CollectiveFailed(MegaflowError):
    """A collective ended with an error or not within its bound: a peer is gone, stopped, or elsewhere."""

    retriable = True


class Communicator:
    """One generation's group. Every rank calls the same operations in the same order.

    store: the generation's key-value store; `timeout_seconds` bounds each operation.
    alive: called about once a second while an operation waits for others.
    """

    def __init__(
        self,
        store: Any,
        *,
        generation: int,
        rank: int,
        world_size: int,
        device: torch.device | None = None,
        timeout_seconds: float = 30.0,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.generation, self.rank, self.world_size = generation, rank, world_size
        self.device = device or torch.device("cpu")
        self.timeout_seconds = timeout_seconds
        self.alive = alive
        keys = PrefixStore(f"generation-{generation}", store)
        bound = timedelta(seconds=timeout_seconds)
        # torch's stubs know few methods of a raw process group.
        self._bytes: Any
        self._tensors: Any
        try:
            self._bytes = dist.ProcessGroupGloo(PrefixStore("gloo", keys), rank, world_size, bound)
            self._tensors = self._bytes
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = bound
                self._tensors = dist.ProcessGroupNCCL(PrefixStore("nccl", keys), rank, world_size, options)
        except RuntimeError as error:
            raise CollectiveFailed(
                f"the group of generation {generation} did not form: {_first_line(error)}", rank=rank
            ) from error

    def all_reduce(self, tensor: Tensor, what: str = "all_reduce") -> None:
        """Sums `tensor` over the ranks, in place."""
        if self.world_size > 1:
            self._run(what, lambda: self._tensors.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, what: str = "broadcast") -> None:
        """Rank 0's `tensor` becomes everybody's, in place. It must be contiguous."""
        if self.world_size > 1:
            self._run(what, lambda: self._tensors.broadcast(tensor, 0))

    def barrier(self, what: str = "barrier") -> None:
        self.all_gather_integers([0], what)

    def broadcast_bytes(self, payload: bytes | None, what: str = "broadcast") -> bytes:
        """Rank 0 gives the payload, the others None; all get it."""
        if self.world_size == 1:
            return payload or b""
        first = _begin(payload or b"")
        self._run(what, lambda: self._bytes.broadcast(first, 0))
        size, begin = _begun(first)
        if size <= len(begin):
            return begin
        rest = bytearray(payload[INLINE_BYTES:] if self.rank == 0 and payload else size - INLINE_BYTES)
        self.broadcast_buffer(torch.frombuffer(rest, dtype=torch.uint8), what)
        return begin + rest

    def broadcast_buffer(self, buffer: Tensor, what: str = "broadcast") -> None:
        """Rank 0's bytes (uint8, on the CPU) become everybody's, in place, in pieces that each have the bound."""
        if self.world_size > 1:
            for start in range(0, len(buffer), PIECE_BYTES):
                self._run(what, partial(self._bytes.broadcast, buffer[start : start + PIECE_BYTES], 0))

    def all_gather_integers(self, values: Sequence[int], what: str = "gather") -> list[list[int]]:
        """Each rank's values, as many on each, by rank."""
        mine = torch.tensor(list(values), dtype=torch.int64)
        if self.world_size == 1:
            return [mine.tolist()]
        out = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._run(what, lambda: self._bytes.allgather([out], [mine]))
        return [t.tolist() for t in out]

    def exchange_bytes(self, payloads: Sequence[bytes], what: str = "exchange") -> list[bytes]:
        """payloads[r] goes to rank r; what rank r sent here comes back at index r."""
        if self.world_size == 1:
            return list(payloads)
        sizes = self.all_gather_integers([len(p) for p in payloads], what)
        incoming = [row[self.rank] for row in sizes]
        if not any(any(row) for row in sizes):
            return [b""] * self.world_size
        sent = torch.frombuffer(bytearray(b"".join(payloads) or b"\0"), dtype=torch.uint8)
        sent = sent[: sum(len(p) for p in payloads)]
        got = torch.empty(sum(incoming), dtype=torch.uint8)
        splits = [len(p) for p in payloads]
        self._run(what, lambda: self._bytes.alltoall_base(got, sent, incoming, splits))
        data, out, start = got.numpy().tobytes(), [], 0
        for length in incoming:
            out.append(data[start : start + length])
            start += length
        return out

    def gather_bytes(self, payload: bytes, what: str = "gather") -> list[bytes]:
        """On rank 0 the payload of each rank, elsewhere an empty list."""
        if self.world_size == 1:
            return [payload]
        mine = _begin(payload)
        firsts = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._run(what, lambda: self._bytes.allgather([firsts], [mine]))
        begun = [_begun(first) for first in firsts]
        out = [begin for _, begin in begun]
        if any(size > len(begin) for size, begin in begun):
            rests = self.exchange_bytes([payload[INLINE_BYTES:]] + [b""] * (self.world_size - 1), what)
            out = [begin + rest for begin, rest in zip(out, rests, strict=True)]
        return out if self.rank == 0 else []

    def _run(self, what: str, start: Callable[[], dist.Work]) -> None:
        began = time.monotonic()
        try:
            work = start()
            while not _wait(work, WAKE_SECONDS):
                if time.monotonic() - began > self.timeout_seconds:
                    raise CollectiveFailed(
                        f"{what} did not end within {self.timeout_seconds:g} s: another rank is stopped or stuck",
                        rank=self.rank,
                        generation=self.generation,
                    )
                self.alive()
        except RuntimeError as error:
            raise CollectiveFailed(
                f"{what} failed, a peer is gone: {_first_line(error)}", rank=self.rank, generation=self.generation
            ) from error


def _begin(payload: bytes) -> Tensor:
    """The first message of a payload: its length, and what of it fits."""
    head = len(payload).to_bytes(8, "little") + payload[:INLINE_BYTES]
    return torch.frombuffer(bytearray(head.ljust(8 + INLINE_BYTES)), dtype=torch.uint8)


def _begun(first: Tensor) -> tuple[int, bytes]:
    """The payload's length, and its beginning."""
    data = first.numpy().tobytes()
    size = int.from_bytes(data[:8], "little")
    return size, data[8 : 8 + min(size, INLINE_BYTES)]


def _wait(work: dist.Work, seconds: float) -> bool:
    """Whether the work ended within `seconds`; raises its error."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended just now, well or with its own error
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
