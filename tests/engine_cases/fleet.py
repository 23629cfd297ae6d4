"""Worker processes with a fault each, at an exact place, in a seeded order."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

POINTS = (
    "worker.before_init",
    "worker.after_init",
    "worker.before_offsets",
    "worker.before_commit",
    "worker.after_commit",
    "compute.before_handler",
)


@dataclass
class Fleet:
    """`size` workers; each is born with the next fault of the seed, until there are no more."""

    broker: str
    path: Path
    name: str
    prefix: str
    folder: Path
    seed: int
    faults: int
    size: int = 2
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    bearing: dict[int, Path | None] = field(default_factory=dict)
    born: int = 0

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.schedule = [self._fault(rng, number) for number in range(self.faults)]

    def _fault(self, rng: random.Random, number: int) -> dict[str, object]:
        point = rng.choice(POINTS)
        action = "kill" if point.startswith("compute") or rng.random() < 0.7 else "stop"
        # A start happens once in a worker's life, commits and calls go on: every fault finds its place.
        nth = 1 if point.endswith("_init") else rng.randint(1, 4)
        return {"point": point, "nth": nth, "action": action, "once": str(self.folder / f"fault-{number}")}

    def tend(self) -> None:
        """Replaces the dead. A worker whose fault left it alive makes room for the next one while faults are left."""
        self.workers = [w for w in self.workers if w.poll() is None]
        if self.born < self.faults:
            spent = [w for w in self.workers if self._spent(w) and not self._stopped(w)]
            for worker in spent[:1]:
                worker.kill()
                worker.wait()
                self.workers.remove(worker)
        while len([w for w in self.workers if not self._stopped(w)]) < self.size:
            self._spawn()

    def _spawn(self) -> None:
        fault = self.schedule[self.born : self.born + 1]
        self.born += 1
        log = (self.folder / f"worker-{self.born}.log").open("ab")
        self.workers.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.engine_cases.worker", self.broker, str(self.path), self.name],
                cwd=Path(__file__).parents[2],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "MEGAFLOW_FAULTS": json.dumps(fault),
                    "ENGINE_CASE_PREFIX": self.prefix,
                    "ENGINE_CASE_SLOW_US": "300",
                },
            )
        )
        log.close()
        self.bearing[self.workers[-1].pid] = Path(str(fault[0]["once"])) if fault else None

    def _spent(self, worker: subprocess.Popen[bytes]) -> bool:
        fault = self.bearing[worker.pid]
        return fault is not None and fault.exists()

    def _stopped(self, worker: subprocess.Popen[bytes]) -> bool:
        try:
            state = Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return False
        return state == "T"

    def thaw(self) -> int:
        """Wakes every stopped worker: each is a zombie now. Returns how many there were."""
        stopped = [w for w in self.workers if self._stopped(w)]
        for worker in stopped:
            worker.send_signal(signal.SIGCONT)
        return len(stopped)

    @property
    def struck(self) -> int:
        return len(list(self.folder.glob("fault-*")))

    def end(self) -> list[int]:
        """SIGTERM to all; their exit statuses."""
        self.thaw()
        for worker in self.workers:
            worker.terminate()
        return [worker.wait(30) for worker in self.workers]
