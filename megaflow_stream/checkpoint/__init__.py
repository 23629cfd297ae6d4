"""Checkpoints: content-hashed immutable chunks, a manifest, and a head that moves by compare-and-set.

Tensors are named byte buffers with dtype and shape; torch stays out of here (`megaflow_stream.evaluation.load` puts a
checkpoint into a model).
"""

from megaflow_stream.checkpoint import alias, names
from megaflow_stream.checkpoint.head import Head, head, take_over
from megaflow_stream.checkpoint.hold import Hold
from megaflow_stream.checkpoint.manifest import Manifest, ManifestRef
from megaflow_stream.checkpoint.prune import Pruned, prune
from megaflow_stream.checkpoint.reader import Loaded, Skipped, chain, load, read_manifest, resolve
from megaflow_stream.checkpoint.tensor import ITEM_BYTES, KINDS, MODEL, Kind, TensorSpec
from megaflow_stream.checkpoint.verify import Verified, verify
from megaflow_stream.checkpoint.writer import CheckpointWriter, Saved, Snapshot

__all__ = [
    "ITEM_BYTES",
    "KINDS",
    "MODEL",
    "CheckpointWriter",
    "Head",
    "Hold",
    "Kind",
    "Loaded",
    "Manifest",
    "ManifestRef",
    "Pruned",
    "Saved",
    "Skipped",
    "Snapshot",
    "TensorSpec",
    "Verified",
    "alias",
    "chain",
    "head",
    "load",
    "names",
    "prune",
    "read_manifest",
    "resolve",
    "take_over",
    "verify",
]
