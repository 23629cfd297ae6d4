"""Bytes between ranks, around the size that travels with its length."""

from __future__ import annotations

import pytest

from megaflow_stream.elastic.communicator import INLINE_BYTES, Communicator
from tests.unit.rank_threads import on_ranks

RANKS = 3


def payload(rank: int, size: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(size))


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 0, 0),
        (1, 0, 7),
        (INLINE_BYTES, INLINE_BYTES - 1, 2),
        (INLINE_BYTES + 1, 0, 3),
        (5, 3 * INLINE_BYTES, 100_000),
    ],
)
def test_bytes_arrive_as_they_were_sent_whatever_their_size(sizes: tuple[int, ...]) -> None:
    sent = [payload(rank, size) for rank, size in enumerate(sizes)]

    def work(group: Communicator) -> tuple[list[bytes], bytes, list[bytes]]:
        rank = group.rank
        gathered = group.gather_bytes(sent[rank])
        said = group.broadcast_bytes(sent[0] if rank == 0 else None)
        return gathered, said, group.exchange_bytes([sent[rank][: 10 * to] for to in range(RANKS)])

    found = on_ranks(RANKS, work)
    assert [gathered for gathered, _, _ in found] == [sent, [], []]
    assert [said for _, said, _ in found] == [sent[0]] * RANKS
    for rank, (_, _, exchanged) in enumerate(found):
        assert exchanged == [sent[other][: 10 * rank] for other in range(RANKS)]
