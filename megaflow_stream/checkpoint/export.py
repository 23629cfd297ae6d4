"""A checkpoint's model as a safetensors file, without torch. Format: https://github.com/huggingface/safetensors.

The file is a header in JSON (8 bytes of length before it) and the tensors' bytes, one behind another. It is written
tensor by tensor, since nothing of it needs a second copy, to a file beside the target that then takes its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import orjson

from megaflow_stream.checkpoint.reader import Loaded
from megaflow_stream.errors import MegaflowError, UsageError

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}


def export(loaded: Loaded, path: Path, *, rename: Callable[[str], str] | None = None, overwrite: bool = False) -> int:
    """Writes the loaded tensors; returns the file's bytes. The metadata say job, step, manifest and definition.

    rename: parameter name -> name in the file. Raises `UsageError` where the file is there already and `overwrite` is
    not given, `MegaflowError` where two tensors get one name."""
    if path.exists() and not overwrite:
        raise UsageError("the file is there already", hint="name another one, or give --force", file=path)
    manifest = loaded.manifest
    header: dict[str, object] = {
        "__metadata__": {
            "format": "pt",
            "megaflow.job": manifest.job,
            "megaflow.step": str(manifest.step),
            "megaflow.manifest": loaded.key,
            **{f"megaflow.{name}": value for name, value in manifest.definition.items()},
        }
    }
    place = 0
    # The widest first, as safetensors' own writer does: then each tensor's bytes are aligned to its items.
    tensors = sorted(loaded.tensors, key=lambda item: -item[0].item_bytes)
    for spec, view in tensors:
        name = rename(spec.name) if rename else spec.name
        if name in header:
            raise MegaflowError("two tensors would have one name in the file", tensor=spec.name, name=name)
        header[name] = {
            "dtype": SAFETENSORS[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [place, place + view.nbytes],
        }
        place += view.nbytes
    head = orjson.dumps(header)
    head += b" " * (-len(head) % 8)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(head).to_bytes(8, "little"))
            file.write(head)
            for _, view in tensors:
                file.write(view)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return 8 + len(head) + place
