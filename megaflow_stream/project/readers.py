"""Who reads the topics of a project."""

from __future__ import annotations

from megaflow_stream.observe.lag import Follower
from megaflow_stream.project.folder import Project


def followers(project: Project) -> list[Follower]:
    """Everybody who reads a topic of the project: its processors, its trainers, its evaluations, the statistics agent.

    A trainer's group is its plan cursor: what it has planned, which may be ahead of its checkpoint."""
    found: list[Follower] = []
    for stage in project.pipeline().ordered():
        kind = project.kind(stage)
        if kind == "processor":
            for _, processor in project.processors(stage):
                found.append(Follower(group=processor.group, topics=[processor.source]))
        elif kind == "trainer":
            _, trainer = project.trainer(stage.name)
            found.append(Follower(group=f"megaflow.train.{trainer.name}", topics=[trainer.data]))
        else:
            found.append(Follower(group=f"megaflow.evaluate.{stage.name}", topics=["checkpoints"]))
    found.append(Follower(group="megaflow.statistics", topics=["processing.statistics"]))
    return found
