"""Evaluation: checkpoints' losses on the validation split, in a process of its own, and the promotion of the best."""

from megaflow_stream.evaluation.evaluate import Measured, evaluate
from megaflow_stream.evaluation.evaluator import Evaluator, Topics
from megaflow_stream.evaluation.load import DoesNotFit, load_into, put_into
from megaflow_stream.evaluation.promotion import Decision, Score, Verdict, decide

__all__ = [
    "Decision",
    "DoesNotFit",
    "Evaluator",
    "Measured",
    "Score",
    "Topics",
    "Verdict",
    "decide",
    "evaluate",
    "load_into",
    "put_into",
]
