"""Whether the model learns: the whole pipeline on conversations, and its validation loss beside a unigram model's.

    python benchmarks/learning.py ../shared/data/tau-bench
    python benchmarks/learning.py topics/samples --json

A project is made in a temporary folder (or in --project, which is kept), with a tokenizer trained on the very
conversations. The unigram model has the frequencies of the trained tokens (add-one), and is measured on the same
validation tokens: what it costs to know the vocabulary and nothing of the order. Prints both in nats a token, and where
the plots are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megaflow_stream.features import record
from megaflow_stream.features.tokenizer import Tokenizer
from megaflow_stream.observe.scan import scan
from megaflow_stream.project.folder import find
from megaflow_stream.project.scaffold import init
from megaflow_stream.runtime.connection import connected


def megaflow(root: Path, *arguments: str) -> dict[str, Any]:
    """A command's last line of JSON; its messages go on to stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "megaflow_stream.cli.main", *arguments, "--project", str(root), "--json"],
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"megaflow {' '.join(arguments)} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def unigram(root: Path, topic: str) -> tuple[float, int]:
    """(loss in nats a token, validation tokens) of the frequencies of the trained tokens."""
    project = find(root)
    size = Tokenizer.load(root / "processors" / "tokenizer.json").size
    counts: dict[str, Any] = {}
    async with connected(project, project.settings, s3=False) as connection:
        for name in (topic, f"{topic}.validation"):
            counts[name] = np.zeros(size, np.int64)
            async for row in scan(connection.bus, name):
                sequence = record.decode(row.value or b"")
                counts[name] += np.bincount(sequence.tokens[sequence.loss_mask], minlength=size)
    trained, validation = counts[topic] + 1, counts[f"{topic}.validation"]
    loss = -(validation * np.log(trained / trained.sum())).sum() / max(1, validation.sum())
    return float(loss), int(validation.sum())


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="megaflow-learning-") as made:
        yield Path(made) / "project"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path)
    parser.add_argument("--project", type=Path, help="made here, and kept")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    inputs = [str(path.resolve()) for path in args.inputs]
    with folder(args.project) as root:
        init(root)
        megaflow(root, "tokenizer", "train", *inputs, "--output", str(root / "processors" / "tokenizer.json"))
        summary = megaflow(root, "run", "--until-idle", *(f"--input={path}" for path in inputs))
        baseline, tokens = asyncio.run(unigram(root, "features.agent"))
        found = {
            "conversations": summary["conversations_published"],
            "steps": summary["steps"],
            "tokens": summary["tokens"],
            "tokens_per_second": summary["tokens_per_second"],
            "first_loss": summary["first_loss"],
            "last_loss": summary["last_loss"],
            "validation_tokens": tokens,
            "validation_loss": summary["validation_loss"],
            "unigram_loss": round(baseline, 4),
            "beats_unigram": summary["validation_loss"] is not None and summary["validation_loss"] < baseline,
        }
        plot = Path(summary["run_folder"]) / "loss.txt"
        if not args.json:
            print(plot.read_text() if plot.is_file() else "")
            for name, value in found.items():
                print(f"{name:20} {value}")
            if args.project:
                print(f"{'plot':20} {Path(summary['run_folder']) / 'loss.png'}")
        else:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
