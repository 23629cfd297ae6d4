"""The processor `features`: canonical conversations -> packed sequences of tokens, by dataset and split.

Packs are closed with the batch: what is read together is packed together, so a processor of this handler lingers.
Validation is chosen by a stable hash of the conversation's id, never by chance, and is never trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from megaflow_stream.conversations.canonical import ROLES, Conversation, from_json
from megaflow_stream.definitions.processor import Dropped, Handler, Rejected, Result
from megaflow_stream.errors import BadRecord, SettingError
from megaflow_stream.features.pack import Part, pack, padding_tokens, split
from megaflow_stream.features.record import PackedSequence, encode, headers
from megaflow_stream.features.render import render
from megaflow_stream.features.tokenizer import Tokenizer, one_cpu
from megaflow_stream.processing.steps import columns

HEADERS = ("conversation", "dataset", "producer")
"""Input headers that the handler reads."""

_COUNTED = ("tokens", "trainable", "conversations", "tokenizer")


def is_validation(conversation: str, share: float) -> bool:
    """Whether a conversation is held out: by the BLAKE2b hash of its id, so in every run, on every machine, alike."""
    number = int.from_bytes(hashlib.blake2b(conversation.encode(), digest_size=8).digest())
    return number < share * 2**64


@dataclass(frozen=True, kw_only=True)
class Features:
    """Builds the handler.

    tokenizer: the tokenizer's file. block_tokens: length of a block, as the trainer's. datasets: those that topics are
    declared for. validation_share: part of the conversations that is held out, 0 to 1. output: the topic's name with
    `{dataset}` in it; validation goes to the same with `.validation` behind.
    """

    tokenizer: Path
    block_tokens: int = 512
    datasets: Sequence[str] = ("agent",)
    validation_share: float = 0.05
    output: str = "features.{dataset}"

    def __post_init__(self) -> None:
        if not 0 <= self.validation_share < 1:
            raise SettingError(f"validation_share is a part, from 0 to below 1, not {self.validation_share}")
        if self.block_tokens < 2:
            raise SettingError(f"block_tokens is at least 2, not {self.block_tokens}")

    def __call__(self) -> Handler:
        one_cpu()
        return _Handler(self, Tokenizer.load(self.tokenizer))


class _Handler:
    def __init__(self, options: Features, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer = options, tokenizer

    def __call__(self, batch: pa.RecordBatch) -> Result:
        offsets, values = (columns.values(batch, name) for name in ("offset", "value"))
        ids, datasets, producers = (columns.texts(batch, name) for name in HEADERS)
        dropped: list[Dropped] = []
        rejected: list[Rejected] = []
        counts = columns.Counts()
        read: list[tuple[int, str, Conversation]] = []
        for row, offset in enumerate(offsets):
            try:
                conversation = self._read(values[row], ids[row], datasets[row])
                read.append((offset, producers[row], conversation))
            except BadRecord as error:
                counts.add(datasets[row], producers[row], rejected=1)
                rejected.append(Rejected(offset, str(error), ids[row]))

        parts: dict[tuple[str, bool], list[Part]] = {}
        rendered = render([conversation for _, _, conversation in read], self.tokenizer)
        for (offset, producer, conversation), tokens in zip(read, rendered, strict=True):
            dataset = conversation.dataset
            held_out = is_validation(conversation.id, self.options.validation_share)
            cut = split(tokens, self.options.block_tokens)
            counts.add(
                dataset,
                producer,
                conversations=1,
                validation_conversations=int(held_out and bool(cut.parts)),
                tokens=sum(len(part.tokens) for part in cut.parts),
                trainable_tokens=sum(int(part.loss_mask.sum()) for part in cut.parts),
                truncated=cut.truncated,
                truncated_tokens=cut.truncated_tokens,
                untrainable=cut.untrainable,
            )
            if cut.parts:
                parts.setdefault((dataset, held_out), []).extend(cut.parts)
            else:
                counts.add(dataset, producer, dropped=1)
                dropped.append(Dropped(offset, conversation.id, "no_trainable_token"))

        outputs = {}
        for (dataset, held_out), members in parts.items():
            sequences = pack(members, self.options.block_tokens, self.tokenizer.hash)
            topic = self.options.output.format(dataset=dataset) + (".validation" if held_out else "")
            outputs[topic] = _records(sequences)
            # A sequence may hold several producers' conversations, so these two are the dataset's, under no producer.
            padding = padding_tokens(sequences, self.options.block_tokens)
            counts.add(dataset, "", sequences=len(sequences), padding_tokens=padding)
        return Result(outputs=outputs, dropped=dropped, rejected=rejected, statistics=counts.statistics())

    def _read(self, value: bytes | None, conversation_id: str, dataset: str) -> Conversation:
        if not value:
            raise BadRecord("the record has no value")
        conversation = from_json(value)
        _check(conversation)
        conversation = replace(
            conversation, id=conversation_id or conversation.id, dataset=dataset or conversation.dataset
        )
        if conversation.dataset not in self.options.datasets:
            raise BadRecord(
                f"no topic is declared for the dataset {conversation.dataset!r}; declare it in topics/ and in "
                f"`datasets` of pipeline.yaml, which are {', '.join(self.options.datasets)}, then replay this record"
            )
        return conversation


def _check(conversation: Conversation) -> None:
    """Another producer than `clean` may have written the topic: what is rendered must be texts of known roles."""
    for index, message in enumerate(conversation.messages):
        if message.role not in ROLES:
            raise BadRecord(f"message {index}: unknown role {message.role!r}; known are {', '.join(ROLES)}")
        texts = [message.content, message.reasoning, message.name]
        texts += [text for call in message.tool_calls for text in (call.name, call.arguments)]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord(f"message {index}: content, reasoning, names and arguments are texts")
    if not isinstance(conversation.tools, str) or not isinstance(conversation.id, str):
        raise BadRecord("the id and the tools of a conversation are texts")


def _records(sequences: Sequence[PackedSequence]) -> pa.RecordBatch:
    """One row a sequence: its bytes, and the headers that differ from record to record."""
    described = [headers(sequence) for sequence in sequences]
    names = {f"header:{name}": pa.array([one[name] for one in described], pa.string()) for name in _COUNTED}
    return pa.record_batch({"value": pa.array([encode(sequence) for sequence in sequences], pa.binary()), **names})
