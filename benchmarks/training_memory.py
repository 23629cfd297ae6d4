"""A rank with its records in memory, for `training.py`: reads plan entries as lines, an empty line starts the block.

python benchmarks/training_memory.py DEFINITION JOB BOOTSTRAP_SERVERS RANK WORLD_SIZE PORT_FILE
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.optim
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megaflow_stream.allocator import keep_freed_memory
from megaflow_stream.bus import TopicPartition, connect
from megaflow_stream.definitions.loading import definitions
from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.elastic.communicator import Communicator
from megaflow_stream.elastic.reduction import BitAccumulator
from megaflow_stream.features import record as features
from megaflow_stream.observe.scan import scan
from megaflow_stream.training.batch import MicroBatch, micro_batch
from megaflow_stream.training.plan import PlanEntry, assign, owner, slices

Records = dict[TopicPartition, dict[int, features.PackedSequence]]


async def read(servers: str, topic: str) -> Records:
    """The whole topic, decoded."""
    bus = await connect(servers)
    found: Records = {partition: {} for partition in await bus.partitions(topic)}
    async for record in scan(bus, topic):
        at = TopicPartition(record.topic, record.partition)
        found[at][record.offset] = features.decode(record.value or b"")
    await bus.close()
    return found


class Memory:
    """What a rank does in a step, from batches that are there."""

    def __init__(self, trainer: Trainer, records: Records, communicator: Communicator) -> None:
        self.trainer, self.records, self.communicator = trainer, records, communicator
        torch.set_num_threads(trainer.threads_per_rank)
        torch.manual_seed(trainer.seed)
        self.model = trainer.build_model()
        self.optimizer = trainer.build_optimizer(self.model.named_parameters())
        self.schedule = trainer.build_schedule(self.optimizer) if trainer.build_schedule else None
        self.accumulator = BitAccumulator(self.model.parameters(), trainer.quantum_bits)
        names = sorted(records)
        self.owners = {p: owner(i, len(names), communicator.world_size) for i, p in enumerate(names)}

    def batches(self, entry: PlanEntry) -> tuple[int, list[MicroBatch]]:
        """The step's slices over all ranks, and this rank's of them."""
        all_slices = slices(entry)
        mine = assign(all_slices, self.owners, self.communicator.world_size)
        found = []
        for part, rank in zip(all_slices, mine, strict=True):
            if rank == self.communicator.rank:
                rows = [s for o, s in self.records[part.partition].items() if part.begin <= o < part.end]
                found.append(micro_batch(rows, rows=self.trainer.micro_slice, block_tokens=self.trainer.block_tokens))
        return len(all_slices), found

    def step(self, count: int, batches: list[MicroBatch]) -> float:
        self.accumulator.begin(count)
        for batch in batches:
            loss, tokens = self.trainer.loss(self.model, batch)
            loss.backward()
            self.accumulator.slice_done(tokens, loss.item())
        self.communicator.all_reduce(self.accumulator.flat)
        reduced = self.accumulator.finish()
        if self.trainer.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.accumulator.parameters, self.trainer.clip_norm, foreach=True)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return reduced.loss / reduced.tokens


def store(rank: int, path: Path) -> Any:
    bound = timedelta(seconds=300)
    if rank == 0:
        opened = TCPStore("127.0.0.1", 0, None, True, bound, wait_for_workers=False)
        part = path.with_suffix(".part")
        part.write_text(str(opened.port))
        part.replace(path)
        return opened
    while not path.exists():
        time.sleep(0.02)
    return TCPStore("127.0.0.1", int(path.read_text()), None, False, bound, wait_for_workers=False)


def main() -> None:
    keep_freed_memory()  # as the ranks do
    definition, name, servers, rank, world_size, port_file = sys.argv[1:]
    trainer = next(t for t in definitions(Path(definition), Trainer) if t.name == name)
    communicator = Communicator(
        store(int(rank), Path(port_file)),
        generation=1,
        rank=int(rank),
        world_size=int(world_size),
        timeout_seconds=300.0,
    )
    memory = Memory(trainer, asyncio.run(read(servers, trainer.data)), communicator)
    say({"ready": True})
    steps: list[tuple[int, list[MicroBatch]]] = []
    for line in sys.stdin.buffer:
        if line.strip():
            steps.append(memory.batches(PlanEntry.from_json(line)))
            continue
        communicator.barrier()
        losses, seconds, used = [], [], time.process_time()
        begun = time.perf_counter()
        for count, batches in steps:
            losses.append(memory.step(count, batches))
            begun, before = time.perf_counter(), begun
            seconds.append(begun - before)
        say({"losses": losses, "seconds": seconds, "cpu": time.process_time() - used})
        steps.clear()


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
