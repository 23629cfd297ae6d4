"""Byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2) by `tokenizers`, and the control tokens around it.

The tokenizer is trained once, before a stream; its file is named by its SHA-256 in every feature record. Control
tokens are put in by `features.render` alone: a text that spells one is encoded as text, and decodes to itself.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from megaflow_stream.errors import NotFound, SettingError

BEGIN, SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = (
    f"<|{name}|>" for name in ("begin", "system", "developer", "user", "assistant", "tool")
)
CALL, THINK, END, PAD = (f"<|{name}|>" for name in ("call", "think", "end", "pad"))
CONTROLS = (BEGIN, SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, CALL, THINK, END, PAD)
"""The control tokens; their ids are their places here, 0 to 9."""

# Words with the space before them, numbers three digits at a time, punctuation, blanks: as in GPT-4's pattern, without
# its English contractions. Each alternative eats at least one character and looks one ahead: linear time.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CACHED_CHARACTERS = 256
_CACHE_BYTES = 32 << 20


def train(texts: Iterable[str], vocab_size: int = 4096) -> bytes:
    """Trains on `texts` and returns the tokenizer's file. The same texts in the same order give the same bytes.

    vocab_size: all tokens: 10 control tokens, 256 bytes, and merges; fewer come out of little text.
    """
    smallest = len(CONTROLS) + 256
    if vocab_size < smallest:
        raise SettingError(f"a byte-level vocabulary has at least {smallest} tokens, not {vocab_size}")
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(CONTROLS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return str(model.to_str(pretty=False)).encode()


def one_cpu() -> None:
    """Keeps the tokenizer's own threads from taking more than this process's CPU slot."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class Tokenizer:
    """A trained tokenizer.

    hash: SHA-256 of its file, in hex. size: number of tokens; ids are below it. dtype: the narrowest type of an id.
    control: a control token's id by its spelling.
    """

    def __init__(self, data: bytes, name: str = "tokenizer") -> None:
        """data: the file's content. Raises `SettingError` where it is none of ours."""
        try:
            self._model = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception
            raise SettingError(f"{name} is not a tokenizer file: {error}") from error
        # A control token's spelling in a text is text.
        self._model.encode_special_tokens = True
        self.hash = hashlib.sha256(data).hexdigest()
        self.size: int = self._model.get_vocab_size()
        self.dtype: type[np.uint16] | type[np.uint32] = np.uint16 if self.size <= 1 << 16 else np.uint32
        self.control: dict[str, int] = {}
        for place, token in enumerate(CONTROLS):
            if self._model.token_to_id(token) != place:
                raise SettingError(
                    f"{name} has no control token {token} at id {place}",
                    hint="train one with `megaflow tokenizer train`",
                )
            self.control[token] = place
        self._cache: OrderedDict[str, NDArray[Any]] = OrderedDict()
        self._cached_bytes = 0

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """The tokenizer at `path`. Raises `NotFound` and `SettingError`."""
        if not path.is_file():
            raise NotFound(f"there is no tokenizer at {path}", hint="train one with `megaflow tokenizer train`")
        return cls(path.read_bytes(), path.name)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The token ids of each text, `dtype` [tokens]; never a control token. Empty texts give empty arrays.

        Equal texts are encoded once; long ones (system prompts, tool schemas) are remembered between calls.
        """
        found: dict[str, NDArray[Any]] = {}
        missing: dict[str, None] = {}
        for text in texts:
            if text in found or text in missing:
                continue
            if (ids := self._cache.get(text)) is not None:
                self._cache.move_to_end(text)
                found[text] = ids
            else:
                missing[text] = None
        batch = self._model.encode_batch_fast(list(missing), add_special_tokens=False)
        for text, encoding in zip(missing, batch, strict=True):
            found[text] = ids = np.array(encoding.ids, self.dtype)
            if len(text) >= _CACHED_CHARACTERS:
                self._remember(text, ids)
        return [found[text] for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """The text of `ids`, control tokens spelled out."""
        return str(self._model.decode([int(i) for i in ids], skip_special_tokens=False))

    def _remember(self, text: str, ids: NDArray[Any]) -> None:
        self._cache[text] = ids
        self._cached_bytes += len(text) + ids.nbytes
        while self._cached_bytes > _CACHE_BYTES:
            old, gone = self._cache.popitem(last=False)
            self._cached_bytes -= len(old) + gone.nbytes
