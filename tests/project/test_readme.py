"""The program in the README, taken from it as it stands, on a real broker."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from megaflow_stream.bus import TopicDescription, connect
from tests.integration.publish_case import read_all

ROOT = Path(__file__).resolve().parents[2]


def example() -> str:
    """The README's Python program; there is one."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return str(code)


async def test_the_publisher_of_the_readme_publishes(kafka: str, tmp_path: Path) -> None:
    topic, code = f"raw-{os.urandom(4).hex()}", example()
    assert code.count('"localhost:9092"') == 1
    program = tmp_path / "program.py"
    program.write_text(code.replace('"localhost:9092"', f'"{kafka}", topic="{topic}"'))
    bus = await connect(kafka)
    try:
        await bus.create_topic(TopicDescription(topic, 2))
        ran = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-W", "error", str(program)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        (record,) = await read_all(bus, topic)
        await bus.delete_topic(topic)
    finally:
        await bus.close()
    assert dict(record.headers)["dataset"] == b"agent"
    assert dict(record.headers)["producer"] == b"my-app"
    assert b'"Hello!"' in (record.value or b"")
