"""Counts by dataset and producer: aggregating, adding ranges once, merging copies."""

from __future__ import annotations

import random

import pytest

from megaflow_stream.definitions.processor import Statistic
from megaflow_stream.errors import BadRecord
from megaflow_stream.processing.statistics import Counted, Outcome, Totals, aggregate, totals_key


def counted(begin: int, end: int, *, partition: int = 0, processor: str = "clean", records: int = 1) -> Counted:
    return Counted(
        processor=processor,
        topic="conversations.raw",
        partition=partition,
        begin=begin,
        end=end,
        dataset="agent",
        producer="me",
        counts={"records": records},
    )


def test_a_batch_has_one_statistic_per_dataset_and_producer() -> None:
    found = aggregate(
        [
            Statistic("b", "x", {"records": 1}),
            Statistic("a", "x", {"records": 2, "bytes": 10}),
            Statistic("b", "x", {"records": 3, "dropped": 1}),
        ]
    )
    assert found == [
        Statistic("b", "x", {"records": 4, "dropped": 1}),
        Statistic("a", "x", {"records": 2, "bytes": 10}),
    ]


def test_a_range_is_added_once_and_gaps_are_no_matter() -> None:
    totals, outcome = Totals(dataset="agent", producer="me").add(counted(3, 10, records=5))
    assert outcome is Outcome.ADDED
    again, outcome = totals.add(counted(3, 10, records=5))
    assert (again, outcome) == (totals, Outcome.REPEATED)
    part, outcome = totals.add(counted(8, 12, records=4))
    assert (part, outcome) == (totals, Outcome.OVERLAPPING)
    totals, outcome = totals.add(counted(15, 16, records=1))
    assert outcome is Outcome.ADDED
    assert totals.counts() == {"clean": {"records": 6}}


def test_sources_are_apart() -> None:
    totals = Totals(dataset="agent", producer="me")
    for one in (counted(0, 5), counted(0, 5, partition=1), counted(0, 5, processor="features")):
        totals, outcome = totals.add(one)
        assert outcome is Outcome.ADDED
    assert totals.counts() == {"clean": {"records": 2}, "features": {"records": 1}}


def test_merging_in_any_order_of_any_old_copies_gives_the_furthest() -> None:
    chance = random.Random(5)
    totals = Totals(dataset="agent", producer="me")
    copies = [totals]
    ends = dict.fromkeys(range(3), 0)
    for _ in range(40):
        partition = chance.randrange(3)
        end = ends[partition] + chance.randrange(1, 9)
        totals, _ = totals.add(counted(ends[partition], end, partition=partition))
        ends[partition] = end
        copies.append(totals)
    for _ in range(20):
        chance.shuffle(copies)
        merged = Totals(dataset="agent", producer="me")
        for copy in copies:
            merged = merged.merge(copy)
        assert merged == totals


def test_what_is_written_is_read() -> None:
    one = counted(0, 5)
    assert Counted.decode(one.encode()) == one
    totals, _ = Totals(dataset="agent", producer="me").add(one)
    assert Totals.of_document(totals.document()) == totals
    assert totals.document()["counts"] == {"clean": {"records": 1}}


def test_keys_of_names_with_slashes_are_apart() -> None:
    assert totals_key("agent", "me") == "agent/me"
    assert totals_key("a/b", "c") != totals_key("a", "b/c")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not an object"),
        (b'{"processor": 1}', "processor is not a string"),
        (
            b'{"processor":"p","topic":"t","partition":0,"begin":5,"end":5,"dataset":"d","producer":"x","counts":{}}',
            "empty",
        ),
        (
            b'{"processor":"p","topic":"t","partition":0,"begin":-1,"end":5,"dataset":"d","producer":"x","counts":{}}',
            "begin is not a number",
        ),
        (
            b'{"processor":"p","topic":"t","partition":0,"begin":0,"end":5,"dataset":"d","producer":"x","counts":{"a":1.5}}',
            "counts is not",
        ),
    ],
)
def test_a_wrong_record_is_refused_by_name(value: bytes | None, says: str) -> None:
    with pytest.raises(BadRecord, match=says):
        Counted.decode(value)
