"""The bare consumer that `loader.py` compares with: aiokafka reads a topic to its end, and counts bytes.

python benchmarks/loader_raw.py BOOTSTRAP_SERVERS TOPIC
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from aiokafka import AIOKafkaConsumer, TopicPartition


async def main(servers: str, topic: str) -> dict[str, float]:
    """read_committed, as training reads; nothing is decoded, nothing kept."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=servers, enable_auto_commit=False, isolation_level="read_committed", auto_offset_reset="none"
    )
    await consumer.start()
    partitions = [
        TopicPartition(topic, n) for n in sorted(consumer.partitions_for_topic(topic) or await names(consumer, topic))
    ]
    ends = await consumer.end_offsets(partitions)
    records = size = 0
    began, used = time.perf_counter(), time.process_time()
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 0)
    while any([await consumer.position(p) < end for p, end in ends.items()]):
        found = await consumer.getmany(timeout_ms=100, max_records=1000)
        for part in found.values():
            records += len(part)
            size += sum([len(record.value) for record in part])
    seconds, used = time.perf_counter() - began, time.process_time() - used
    await consumer.stop()
    return {"seconds": seconds, "cpu": used, "records": records, "bytes": size}


async def names(consumer: AIOKafkaConsumer, topic: str) -> set[int]:
    """The numbers of a topic's partitions, asked of the broker."""
    await consumer._client.add_topic(topic)
    return consumer.partitions_for_topic(topic) or set()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2]))))
