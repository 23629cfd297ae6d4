"""What the synthetic conversations are about: one module a field, each a list of scenes.

A scene takes a `Stage`, speaks its turns on it, and draws every choice from the stage's own random numbers.
"""

from megaflow_stream.conversations.scenes import coding, flights, support, tools
from megaflow_stream.conversations.scenes.stage import Scene, Stage

FIELDS: dict[str, tuple[Scene, ...]] = {
    "support": support.SCENES,
    "flights": flights.SCENES,
    "coding": coding.SCENES,
    "tools": tools.SCENES,
}

__all__ = ["FIELDS", "Scene", "Stage"]
