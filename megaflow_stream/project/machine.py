"""What this machine has, asked without torch."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from megaflow_stream.definitions.pipeline import Machine


def this_machine(devices: Path = Path("/dev")) -> Machine:
    """CPUs that this process may use, GPUs by their device files, memory of the machine."""
    gpus = [path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    return Machine(cpu=len(os.sched_getaffinity(0)), gpu=len(gpus), memory_bytes=int(psutil.virtual_memory().total))
