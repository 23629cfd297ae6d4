"""What a rank takes of the plan: a step whose records are not those that the plan counted is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow_stream.bus.api import TopicPartition
from megaflow_stream.errors import Damaged
from megaflow_stream.training.exchange import Exchange
from megaflow_stream.training.leader import Orders
from megaflow_stream.training.loader import Fetched
from megaflow_stream.training.plan import PlanEntry, Range
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

    def claim(self, part: Any) -> list[Fetched]:
        return [Fetched(offset, 5, b"") for offset in (10, 12, 14) if part.begin <= offset < part.end]


@pytest.mark.parametrize(("records", "tokens", "cuts"), [(3, 15, ()), (3, 15, (14,)), (4, 15, (14,)), (3, 16, ())])
def test_a_step_is_what_the_plan_counted(records: int, tokens: int, cuts: tuple[int, ...]) -> None:
    planned = Range(partition=PARTITION, begin=10, end=15, records=records, trainable_tokens=tokens, cuts=cuts)
    orders = Orders(entries=[Logged(0, PlanEntry(step=1, ranges=(planned,)))])
    exchange = Exchange(Alone(), Buffer(), {PARTITION: 0}, 16)  # type: ignore[arg-type]
    if (records, tokens) == (3, 15):
        exchange(stop=False, lead=lambda views, stops: orders)
        assert [f.offset for _, taken in exchange.inbox.values() for f in taken] == [10, 12, 14]
    else:
        with pytest.raises(Damaged, match=f"the plan has {records} records with {tokens} trainable tokens"):
            exchange(stop=False, lead=lambda views, stops: orders)
