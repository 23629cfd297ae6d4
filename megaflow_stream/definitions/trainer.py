"""A trainer and an evaluation as a project declares them. torch stays out of here: the builders import it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


def _every(name: str) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class CheckpointEvery:
    """When a checkpoint is due: after so many steps, or so many seconds since the last; None is never by that."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A training job over a topic of packed sequences. Nothing in the training code names a model.

    data, validation: topics of packed sequences (`features.record`).
    tokenizer: the tokenizer's file in the project folder; features of another hash are refused.
    build_model: () -> torch.nn.Module, on CPU; called under the job's seed, so that all ranks begin alike. A checkpoint
        holds its parameters and persistent buffers. A buffer that training changes is a function of the slices that a
        rank saw (BatchNorm's running statistics): with several ranks it is refused by name at the first checkpoint.
    loss: (model, micro_batch: training.batch.MicroBatch) -> (summed loss, a scalar tensor with a graph;
        number of trainable tokens, an int). Never a mean: the division is done once, over the whole global batch.
    build_optimizer: (iterable of (name, parameter) that train) -> torch.optim.Optimizer.
    build_schedule: optimizer -> torch.optim.lr_scheduler.LRScheduler, stepped once a step; None keeps the rates.
    trainable: parameter name -> whether it is trained; the others are frozen.
    block_tokens: length of a packed sequence (T of a micro-slice).
    vocabulary: how many token ids the model knows; a tokenizer with more is refused. None leaves that to the model.
    micro_slice: packed sequences of one forward and backward, a fixed shape [micro_slice, block_tokens].
    global_batch: packed sequences of one step, over all ranks; a multiple of micro_slice.
    linger_seconds: a global batch that does not fill is closed after this long.
    clip_norm: the norm that the mean gradient is clipped to; None leaves it.
    quantum_bits: k of the integer accumulation: a gradient of the summed loss is added in units of 2**-k.
    threads_per_rank: torch's threads; part of the definition, since it changes bits.
    rank_timeout_seconds: a rank that makes no progress for this long ends its group, which starts again at the head.
    stop_seconds: from SIGTERM to the end of the ranks: the last checkpoint has so long. One that takes longer is lost,
        and its steps are trained again at the next start. Within `megaflow run` all ends after 10 s at the most.
    max_steps: the job ends after this many, and `run --until-idle` with it; None never.
    export: (name, tensor names) hook for `megaflow checkpoints export`: parameter name -> exported name.
    """

    name: str
    data: str
    validation: str
    tokenizer: str
    build_model: Callable[[], Any]
    loss: Callable[[Any, Any], tuple[Any, int]]
    build_optimizer: Callable[[Iterable[tuple[str, Any]]], Any]
    build_schedule: Callable[[Any], Any] | None = None
    trainable: Callable[[str], bool] = _every
    block_tokens: int = 512
    vocabulary: int | None = None
    micro_slice: int = 4
    global_batch: int = 16
    linger_seconds: float = 2.0
    clip_norm: float | None = 1.0
    quantum_bits: int = 32
    seed: int = 0
    threads_per_rank: int = 1
    rank_timeout_seconds: float = 30.0
    stop_seconds: float = 10.0
    checkpoint: CheckpointEvery = CheckpointEvery(seconds=30.0)
    keep_checkpoints: int = 20
    max_steps: int | None = None
    export: Callable[[str], str] | None = None

    @property
    def plan_topic(self) -> str:
        return f"plan.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluator: follows the checkpoints of `trainer`, evaluates each on its validation topic.

    metric: validation_loss, the mean over trainable tokens; the lowest is promoted to `alias`.
    """

    name: str
    trainer: str
    alias: str = "best"
    micro_slice: int = 8
