"""The one data bus: Kafka topics, by the small interface that the rest of MegaFlow uses."""

from megaflow_stream.bus.api import (
    Assignment,
    Bus,
    GroupReader,
    OutRecord,
    Producer,
    Reader,
    Record,
    TopicDescription,
    TopicPartition,
)
from megaflow_stream.bus.connect import connect

__all__ = [
    "Assignment",
    "Bus",
    "GroupReader",
    "OutRecord",
    "Producer",
    "Reader",
    "Record",
    "TopicDescription",
    "TopicPartition",
    "connect",
]
