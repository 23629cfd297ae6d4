"""The reference job: a small GPT trained on packed agent conversations, loss on the assistant's tokens only.

About 1.3 M parameters. torch is imported by the builders, so that commands that only read this file start at once.
"""

from collections.abc import Iterable
from typing import Any

from megaflow_stream.definitions.trainer import CheckpointEvery, Trainer

VOCABULARY = 4096


def build_model() -> Any:
    from megaflow_stream.training.gpt import GPT, GPTConfig

    return GPT(GPTConfig(vocabulary=VOCABULARY, layers=4, heads=4, width=128, hidden=344))


def build_optimizer(parameters: Iterable[tuple[str, Any]]) -> Any:
    from megaflow_stream.training.optimizers import BuildAdamW

    return BuildAdamW(learning_rate=4e-3, weight_decay=0.1)(parameters)


def build_schedule(optimizer: Any) -> Any:
    from megaflow_stream.training.optimizers import WarmupConstant

    return WarmupConstant(warmup_steps=8)(optimizer)


def loss(model: Any, batch: Any) -> tuple[Any, int]:
    from megaflow_stream.training import gpt

    return gpt.loss(model, batch)


trainer = Trainer(
    name="model_finetune",
    data="features.agent",
    validation="features.agent.validation",
    tokenizer="processors/tokenizer.json",
    build_model=build_model,
    build_optimizer=build_optimizer,
    build_schedule=build_schedule,
    loss=loss,
    block_tokens=512,
    vocabulary=VOCABULARY,
    micro_slice=4,
    global_batch=16,
    threads_per_rank=1,
    checkpoint=CheckpointEvery(seconds=15.0),
)
