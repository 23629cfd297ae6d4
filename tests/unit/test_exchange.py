"""What a rank takes of the plan: a step whose records are not those that the plan counted is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.errors import Damaged
from megaflow_stream.training.exchange import Exchange, _pack_slice
from megaflow_stream.training.leader import Orders
from megaflow_stream.training.loader import Fetched
from megaflow_stream.training.plan import PlanEntry, Range, Slice
from megaflow_stream.training.planlog import Logged

PARTITION = TopicPartition("features.agent", 0)


class Alone:
    """The communicator of a group of one."""

    rank, world_size = 0, 1

    def gather_bytes(self, payload: bytes, doing: str) -> list[bytes]:
        return [payload]

    def broadcast_bytes(self, payload: bytes, doing: str) -> bytes:
        return payload


class Buffer:
    """A loader that has read offsets 10, 12 and 14, each with 5 trainable tokens."""

    def look(self, limit: int) -> dict[TopicPartition, Any]:
        return {}

    def want(self, ends: object) -> None: ...

    def claim(self, planned: Range) -> Fetched:
        return Fetched(np.array([10, 12, 14]), np.array([5, 5, 5]), [b"a", b"b", b"c"])


@pytest.mark.parametrize(
    ("records", "tokens", "cuts"), [(3, 15, ()), (3, 15, (14,)), (4, 15, (14,)), (3, 16, ()), (3, 15, (13,))]
)
def test_a_step_is_what_the_plan_counted(records: int, tokens: int, cuts: tuple[int, ...]) -> None:
    planned = Range(partition=PARTITION, begin=10, end=15, records=records, trainable_tokens=tokens, cuts=cuts)
    orders = Orders(entries=[Logged(0, PlanEntry(step=1, ranges=(planned,)))])
    exchange = Exchange(Alone(), Buffer(), {PARTITION: 0}, 16)  # type: ignore[arg-type]
    if (records, tokens) == (3, 15) and 13 not in cuts:
        exchange(stop=False, lead=lambda views, stops: orders)
        assert [taken.offsets.tolist() for _, taken in exchange.inbox.values()] == (
            [[10, 12], [14]] if cuts else [[10, 12, 14]]
        )
        assert [taken.values for _, taken in exchange.inbox.values()] == (
            [[b"a", b"b"], [b"c"]] if cuts else [[b"a", b"b", b"c"]]
        )
    else:
        with pytest.raises(Damaged, match=f"the plan has {records} records with {tokens} trainable tokens"):
            exchange(stop=False, lead=lambda views, stops: orders)


def test_a_slice_that_another_rank_trains_arrives_as_it_was_sent() -> None:
    fetched = Fetched(np.array([10, 12, 13]), np.array([5, 0, 7]), [b"one", b"", b"three"])
    payload = b"".join(
        _pack_slice(4, index, part, fetched[part.begin - 10 : part.end - 10])
        for index, part in ((0, Slice(PARTITION, 10, 12)), (7, Slice(PARTITION, 12, 13)))
    )
    exchange = Exchange(Alone(), Buffer(), {PARTITION: 0}, 16)  # type: ignore[arg-type]
    exchange._unpack_slices(payload)
    assert {
        key: (part, f.offsets.tolist(), f.trainable_tokens.tolist(), f.values)
        for key, (part, f) in exchange.inbox.items()
    } == {
        (4, 0): (Slice(PARTITION, 10, 12), [10, 12], [5, 0], [b"one", b""]),
        (4, 7): (Slice(PARTITION, 12, 13), [13], [7], [b"three"]),
    }
