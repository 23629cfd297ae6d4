"""Processors of the engine's tests, loaded by path as a project's are. Topics come from the environment's prefix."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import orjson
import pyarrow as pa

from megaflow_stream.definitions.processor import (
    Deduplicate,
    Dropped,
    Handler,
    Processor,
    Rejected,
    Result,
    Sink,
    Statistic,
)

PREFIX = os.environ.get("ENGINE_CASE_PREFIX", "case")
HANG_SECONDS = float(os.environ.get("ENGINE_CASE_HANG_SECONDS", "1"))
BURN_SECONDS = 15.0
SLOW_SECONDS = float(os.environ.get("ENGINE_CASE_SLOW_US", "0")) / 1e6


@dataclass(frozen=True)
class Copy:
    """Values {"n": 1, "body": "..."}: the body says what to do."""

    def __call__(self) -> Handler:
        return self.handle

    def handle(self, batch: pa.RecordBatch) -> Result:
        values, dropped, rejected, numbers = [], [], [], []
        for offset, raw in zip(batch["offset"].to_pylist(), batch["value"].to_pylist(), strict=True):
            value = orjson.loads(raw)
            body = value["body"]
            if body.startswith("HANG"):
                while True:
                    pass
            if body.startswith("BURN"):
                until = time.process_time() + BURN_SECONDS
                while time.process_time() < until:
                    pass
            if body.startswith("RAISE"):
                raise ValueError(body[:10])
            if body.startswith("DIE"):
                os._exit(9)
            if body.startswith("DROP"):
                dropped.append(Dropped(offset, str(value["n"]), "asked"))
            elif body.startswith("REJECT"):
                rejected.append(Rejected(offset, "asked", str(value["n"])))
            else:
                numbers.append(value["n"])
                values.append(orjson.dumps({"offset": offset, "n": value["n"]}))
        if SLOW_SECONDS:
            time.sleep(SLOW_SECONDS * batch.num_rows)
        out = pa.record_batch([pa.array(values, pa.binary())], ["value"])
        count = Statistic("d", "p", {"in": batch.num_rows, "out": len(values)})
        return Result(outputs={f"{PREFIX}.out": out}, dropped=dropped, rejected=rejected, statistics=[count])


def _processor(name: str, *, state: bool) -> Processor:
    return Processor(
        name=f"{PREFIX}-{name}",
        source=f"{PREFIX}.in",
        build=Copy(),
        sinks=[Sink(topic=f"{PREFIX}.out")],
        state=Deduplicate(changelog=f"{PREFIX}.state") if state else None,
        dead_letters=f"{PREFIX}.dlq",
        dropped=f"{PREFIX}.dropped",
        statistics=f"{PREFIX}.statistics",
        batch_records=300,
        commit_interval_seconds=0.05,
        hang_seconds=HANG_SECONDS,
        high_bytes=200_000,
        low_bytes=50_000,
    )


plain = _processor("plain", state=False)
dedup = _processor("dedup", state=True)
