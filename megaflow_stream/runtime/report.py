"""What a run says while it goes: a live table on a terminal, plain lines where there is none, JSON events on request.

JSON: one object a line on stdout, `{"event": NAME, "at": SECONDS, ...}`, the last of them the summary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from megaflow_stream.publishing.report import Report as Published

_PLAIN_SECONDS = 5.0
_REFUSED_SHOWN = 5


class Report(Protocol):
    """Where a run's events go."""

    def event(self, name: str, **data: object) -> None:
        """Something happened once."""
        ...

    def status(self, components: Mapping[str, Mapping[str, Any]], lags: Mapping[str, int]) -> None:
        """How the components are now, and how many records each group is behind."""
        ...

    def close(self) -> None: ...


class JsonReport:
    """Events as JSON lines on stdout."""

    def event(self, name: str, **data: object) -> None:
        sys.stdout.write(orjson.dumps({"event": name, "at": time.time(), **data}, default=str).decode() + "\n")
        sys.stdout.flush()

    def status(self, components: Mapping[str, Mapping[str, Any]], lags: Mapping[str, int]) -> None:
        self.event("status", components=components, lag=lags)

    def close(self) -> None:
        return


class PlainReport:
    """Lines on stderr; status once in a while."""

    def __init__(self) -> None:
        self._at = 0.0
        self._line = ""

    def event(self, name: str, **data: object) -> None:
        if name != "summary":
            print(sentence(name, data), file=sys.stderr, flush=True)

    def status(self, components: Mapping[str, Mapping[str, Any]], lags: Mapping[str, int]) -> None:
        now = time.monotonic()
        line = "; ".join(
            [f"{name}: {brief(state)}" for name, state in components.items() if brief(state)]
            + [f"{group.removeprefix('megaflow.')} behind {lag}" for group, lag in lags.items() if lag]
        )
        if now - self._at >= _PLAIN_SECONDS and line and line != self._line:
            self._at, self._line = now, line
            print("  " + line, file=sys.stderr, flush=True)

    def close(self) -> None:
        return


class LiveReport:
    """A table that is drawn anew, and lines above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=4, transient=True)
        self._live.start()

    def event(self, name: str, **data: object) -> None:
        if name != "summary":
            self._live.console.print(sentence(name, data), markup=False, highlight=False)

    def status(self, components: Mapping[str, Mapping[str, Any]], lags: Mapping[str, int]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("component", "state", "figures"):
            table.add_column(column)
        for name, state in components.items():
            table.add_row(Text(name), Text(str(state.get("state", ""))), Text(brief(state)))
        for group, lag in lags.items():
            table.add_row(Text(group.removeprefix("megaflow.")), Text("behind"), Text(f"{lag} records"))
        self._live.update(table)

    def close(self) -> None:
        self._live.stop()


_FIGURES = ("step", "loss", "tokens_per_second", "world_size", "records", "rate", "validation_loss", "transactions")


def brief(state: Mapping[str, Any]) -> str:
    """The figures of a component that a person looks for first."""
    parts = []
    for name in _FIGURES:
        value = state.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
            parts.append(f"{name.replace('_', ' ')} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}")
    for name in ("stuck", "slow", "held_back", "error"):
        if state.get(name):
            parts.append(f"{name} {state[name]}")
    return ", ".join(parts)


def about_input(made: Published, inputs: Sequence[str]) -> list[str]:
    """What a person wants to know of input that was not published: which, where, why; the rest is in the rejects."""
    if not inputs:  # of the project's own samples some are bad on purpose
        return []
    lines = [f"refused: {reject}" for reject in made.first_rejects[:_REFUSED_SHOWN]]
    if (more := made.rejected - len(lines)) > 0:
        lines.append(f"and {more:,} more refused: all are in rejects.jsonl of the run's folder")
    lines += [f"left alone: {name}" for name in made.passed_files[:_REFUSED_SHOWN]]
    if not made.published and not made.already_published:
        lines.append(f"there is no conversation that could be published in {', '.join(inputs)}")
    return lines


_SENTENCES = {
    "warning": "warning: {note}",
    "input": "{note}",
    "services": "services: Kafka at {kafka}, S3 at {s3} ({seconds:.1f} s)",
    "topics": "topics: {made} created or changed",
    "published": "published {conversations_published} conversations, {already_published} were there already, "
    "{rejected} refused",
    "waiting": "waiting for {part}",
    "ended": "{component} ended with status {status}; it is started again",
    "service_restarted": "{service} had died; it is up again on the same data",
    "checkpoint": "checkpoint of step {step}, loss {loss}",
    "evaluation": "step {step}: validation loss {validation_loss}{promoted}",
    "idle": "nothing is left to do",
    "stopping": "stopping",
}


def sentence(name: str, data: Mapping[str, object]) -> str:
    """An event as a person reads it."""
    try:
        return _SENTENCES[name].format(**data)
    except (KeyError, ValueError):
        return name + (": " + ", ".join(f"{k} {v}" for k, v in data.items()) if data else "")


def choose(json: bool) -> Report:
    if json:
        return JsonReport()
    return LiveReport() if sys.stderr.isatty() else PlainReport()
