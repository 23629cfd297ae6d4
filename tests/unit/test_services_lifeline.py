"""A child notices that its parent is gone, however the parent went."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

from megaflow_stream.runtime import lifeline
from megaflow_stream.runtime.lifeline import Lifeline

CHILD = textwrap.dedent(
    """
    import sys, threading
    from megaflow_stream.runtime import lifeline
    gone = threading.Event()
    assert lifeline.watch(gone.set, hard_exit_seconds=60)
    print("watching", flush=True)
    gone.wait()
    print("parent is gone", flush=True)
    """
)
DEAF = textwrap.dedent(
    """
    import threading
    from megaflow_stream.runtime import lifeline
    lifeline.watch(lambda: None, hard_exit_seconds=0.1)
    print("watching", flush=True)
    threading.Event().wait()
    """
)
PARENT = textwrap.dedent(
    """
    import subprocess, sys
    from megaflow_stream.runtime.lifeline import Lifeline
    line = Lifeline()
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], **line.spawn_options())
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0)
    child.wait()
    """
)


def test_closing_the_lifeline_stops_the_child() -> None:
    with Lifeline() as line:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, **line.spawn_options()
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "watching\n"
    assert child.communicate()[0] == "parent is gone\n"
    assert child.returncode == 0


def test_a_child_outlives_a_parent_killed_with_sigkill_by_no_more_than_its_own_stop() -> None:
    """Beside the child the parent has another one, which must not keep the pipe open."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "watching\n"
    os.kill(parent.pid, signal.SIGKILL)
    assert parent.communicate()[0] == "parent is gone\n"  # the end of file: nobody holds its stdout any more
    assert parent.returncode == -signal.SIGKILL


def test_a_child_that_does_not_stop_exits_hard() -> None:
    with Lifeline() as line:
        child = subprocess.Popen(
            [sys.executable, "-c", DEAF],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **line.spawn_options(),
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "watching\n"
    _, errors = child.communicate()
    assert child.returncode == lifeline.HARD_EXIT_CODE
    assert "did not stop within" in errors


async def test_the_callback_runs_in_the_loop_that_was_given() -> None:
    code = textwrap.dedent(
        """
        import asyncio
        from megaflow_stream.runtime import lifeline
        async def main():
            gone = asyncio.Event()
            lifeline.watch(gone.set, loop=asyncio.get_running_loop())
            print("watching", flush=True)
            await gone.wait()
        asyncio.run(main())
        """
    )
    with Lifeline() as line:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, **line.spawn_options()
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"watching\n"
    assert await child.wait() == 0


def test_without_a_lifeline_nothing_is_watched() -> None:
    assert lifeline.VARIABLE not in os.environ
    assert not lifeline.watch(lambda: None)
