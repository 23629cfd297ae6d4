"""MegaFlow Stream: agent conversations in, evaluated checkpoints out, every record counted once.

The names here are the public ones; everything else may move between versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaflow_stream.bus.security import Security as Security
    from megaflow_stream.publishing.publisher import Publisher as Publisher

__version__ = "0.1.0"
__all__ = ["Publisher", "Security", "__version__"]


def __getattr__(name: str) -> Any:
    """Loads a public name when it is asked for: importing the package alone costs nothing."""
    if name == "Publisher":
        from megaflow_stream.publishing.publisher import Publisher

        return Publisher
    if name == "Security":
        from megaflow_stream.bus.security import Security

        return Security
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
