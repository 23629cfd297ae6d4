"""What a rank counts: of the whole job, kept in its checkpoints, and of its own time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Totals:
    """Of the whole job, in its checkpoints. loss_sum, loss_tokens: since the last checkpoint."""

    records: int = 0
    tokens: int = 0
    seen_tokens: int = 0
    skipped_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    loss_sum: float = 0.0
    loss_tokens: int = 0


@dataclass(slots=True)
class Times:
    """Seconds of this process. data_wait: exchanges that had steps to give; idle: those that had none."""

    steps: float = 0.0
    data_wait: float = 0.0
    idle: float = 0.0
    snapshots: float = 0.0
    seen_tokens: int = 0

    @property
    def data_wait_share(self) -> float:
        busy = self.steps + self.data_wait
        return self.data_wait / busy if busy else 0.0
