"""For tests without a broker: a bus in memory that behaves as Kafka does, with faults on demand.

The handler alone:

    from megaflow_stream.testing import run_processor

    outcome = run_processor(clean, [(b"id", b'{"messages": []}', {"dataset": b"mine"})])
    assert [record.key for record in outcome.outputs["conversations.clean"]] == []

The real engine, with its transactions, on a cluster in memory:

    from megaflow_stream.testing import MemoryCluster, drive

    cluster = MemoryCluster({"conversations.raw": 4})
    cluster.publish("conversations.raw", b"...", key=b"id")
    cluster.inject.rebalance(clean.group)
    await drive(cluster, clean)
    assert len(cluster.records("conversations.clean")) == 1

`tests/contract` runs one suite of behaviours on this bus and on real Kafka.
"""

from megaflow_stream.testing.bus import MemoryBus
from megaflow_stream.testing.cluster import MemoryCluster
from megaflow_stream.testing.drive import caught_up, create_topics, drive
from megaflow_stream.testing.inject import Inject
from megaflow_stream.testing.log import MemoryRecord
from megaflow_stream.testing.processor import LocalCompute, Outcome, run_processor

__all__ = [
    "Inject",
    "LocalCompute",
    "MemoryBus",
    "MemoryCluster",
    "MemoryRecord",
    "Outcome",
    "caught_up",
    "create_topics",
    "drive",
    "run_processor",
]
