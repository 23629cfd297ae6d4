"""The loss curve of a run: from the manifests, so that it is the curve of the steps that made the weights.

Where manifests were pruned, a checkpoint's announcement has the mean loss since the one before it: one point for many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from megaflow_stream.checkpoint.head import head
from megaflow_stream.checkpoint.reader import chain, read_manifest
from megaflow_stream.storage.api import ObjectStore

_WIDTH, _HEIGHT = 72, 12


class Step(NamedTuple):
    """One optimizer step: mean loss in nats a trainable token, tokens of its sequences, seconds that it took."""

    step: int
    loss: float
    tokens: int
    seconds: float


class Totals(NamedTuple):
    """Of a whole job, at its head."""

    step: int = 0
    tokens: int = 0
    first_loss: float | None = None


async def totals(store: ObjectStore, job: str) -> Totals:
    top = await head(store, job)
    if top is None:
        return Totals()
    known = (await read_manifest(store, top.ref)).state.get("totals", {})
    return Totals(top.step, known.get("seen_tokens", 0), known.get("first_loss"))


async def steps(
    store: ObjectStore, job: str, after_step: int = 0, announced: Iterable[tuple[int, float]] = ()
) -> list[Step]:
    """The steps after `after_step` that made the job's head, in order. Each manifest holds those since its parent.

    announced: (step, mean loss) of checkpoints, for what was pruned."""
    top = await head(store, job)
    found: list[Step] = []
    async for ref, manifest in chain(store, top.ref if top else None):
        if ref.step <= after_step:
            break
        found += [Step(*row) for row in manifest.state.get("steps", ()) if row[0] > after_step]
    found.sort()
    begin = found[0].step if found else 0
    return [Step(step, loss, 0, 0.0) for step, loss in announced if after_step < step < begin] + found


def plot_text(curve: Sequence[Step]) -> str:
    """The curve as text, 72 columns wide."""
    if len(curve) < 2:
        return ""
    columns = min(_WIDTH, len(curve))
    means = []
    for column in range(columns):
        part = curve[column * len(curve) // columns : (column + 1) * len(curve) // columns]
        means.append(sum(step.loss for step in part) / len(part))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    rows = [[" "] * columns for _ in range(_HEIGHT)]
    for column, mean in enumerate(means):
        rows[round((high - mean) / span * (_HEIGHT - 1))][column] = "•"
    lines = []
    for number, row in enumerate(rows):
        label = f"{high:8.3f}" if number == 0 else f"{low:8.3f}" if number == _HEIGHT - 1 else " " * 8
        lines.append(f"{label} ┤{''.join(row)}")
    lines.append(" " * 9 + "└" + "─" * columns)
    lines.append(" " * 10 + f"step {curve[0].step}".ljust(columns - 8) + f"step {curve[-1].step}".rjust(8))
    return "\n".join(lines)


def plot_png(curve: Sequence[Step], validation: Sequence[tuple[int, float]], path: Path) -> None:
    """The curve, with the validation losses of the checkpoints, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([s.step for s in curve], [s.loss for s in curve], linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
