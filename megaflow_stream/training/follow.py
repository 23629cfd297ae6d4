"""Reads a topic of one partition from its first record on, for ever, over outages: `control`, `evaluations`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megaflow_stream.bus.api import Bus, Record, TopicPartition
from megaflow_stream.clock import Clock
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.stall import Stall

FETCH_SECONDS = 1.0
RETRY_SECONDS = (0.1, 5.0)

log = logging.getLogger(__name__)


async def follow(bus: Bus, topic: str, take: Callable[[Record], None], clock: Clock) -> None:
    """Calls `take` with each committed record, in order, at least once. Ends only by what `take` raises."""
    place = TopicPartition(topic, 0)
    position: int | None = None
    wait = RETRY_SECONDS[0]
    while True:
        try:
            if position is None:
                position = (await bus.begin_offsets([place]))[place]
            reader = await bus.reader()
            try:
                reader.assign({place: position})
                stall = Stall(bus, clock)
                while True:
                    fetched = await reader.fetch(timeout_seconds=FETCH_SECONDS)
                    for record in fetched.get(place, ()):
                        take(record)
                    position = await reader.position(place)
                    await stall.look({place: position})
                    wait = RETRY_SECONDS[0]
            finally:
                await reader.close()
        except MegaflowError as error:
            log.warning("%s cannot be read, trying again: %s", topic, error)
            if not error.retriable:
                position = None  # expired, or the topic was made again: from its first record
        await clock.sleep(wait)
        wait = min(wait * 2, RETRY_SECONDS[1])
