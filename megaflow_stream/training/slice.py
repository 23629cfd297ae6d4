"""A planned slice, from the bytes of its records to the batch that is trained; what is wrong in it is named."""

from __future__ import annotations

from megaflow_stream.definitions.trainer import Trainer
from megaflow_stream.errors import BadRecord
from megaflow_stream.features import record as features
from megaflow_stream.training.batch import MicroBatch, micro_batch
from megaflow_stream.training.loader import Fetched
from megaflow_stream.training.plan import Slice

_PLANNED = "its step is planned and cannot leave it out: write the features again, and start the job under a new name"


def open_slice(part: Slice, fetched: Fetched, trainer: Trainer) -> tuple[list[features.PackedSequence], MicroBatch]:
    """The sequences of a slice, in order, and their batch.

    Raises `BadRecord` with its place for a record that is no packed sequence, or holds a token that the model does not
    know, and with the slice's place for sequences that do not fit the batch."""
    sequences = []
    for offset, value in zip(fetched.offsets.tolist(), fetched.values, strict=True):
        try:
            sequence = features.decode(value)
            if trainer.vocabulary is not None and (last := int(sequence.tokens.max())) >= trainer.vocabulary:
                raise BadRecord(f"a packed sequence has the token {last}, the vocabulary ends at {trainer.vocabulary}")
        except BadRecord as error:
            raise BadRecord(error.message, hint=_PLANNED, **part.partition._asdict(), offset=offset) from error
        sequences.append(sequence)
    try:
        return sequences, micro_batch(sequences, rows=trainer.micro_slice, block_tokens=trainer.block_tokens)
    except BadRecord as error:
        raise BadRecord(error.message, hint=error.hint, **part.partition._asdict(), offset=part.begin) from error
