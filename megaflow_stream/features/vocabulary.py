"""Whether a trainer's model knows every token of its tokenizer, looked at before anything is trained."""

from __future__ import annotations

from pathlib import Path

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import SettingError
from megaflow_stream.features.tokenizer import Tokenizer


def check_vocabulary(trainer: Trainer, root: Path, file: Path) -> None:
    """Raises `SettingError` where the tokenizer has ids beyond the model's vocabulary, `NotFound` without a tokenizer.

    root: the project's folder. file: the definition's, for the message. Nothing is checked without a vocabulary."""
    if trainer.vocabulary is None:
        return
    size = Tokenizer.load(root / trainer.tokenizer).size
    if size > trainer.vocabulary:
        raise SettingError(
            f"Trainer {trainer.name}: the tokenizer {trainer.tokenizer} has {size} tokens, the model's vocabulary is "
            f"{trainer.vocabulary}",
            hint=f"give the model a vocabulary of {size}, or train a smaller tokenizer: "
            f"`megaflow tokenizer train --vocab-size {trainer.vocabulary}`",
            file=file,
        )
