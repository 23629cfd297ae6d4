"""The declared topics against those of a cluster: what differs, and making the cluster match.

`apply` creates topics, sets settings and adds partitions. It never deletes a topic and never takes partitions away:
both would lose records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megaflow_stream.bus.api import Bus, TopicDescription
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.topic import Topic
from megaflow_stream.errors import BusError

Action = Literal["create", "configure", "extend", "refused", "faust", "undeclared"]

FAUST_APP = "megaflow.statistics"
_VISIBLE_SECONDS = 15.0
_DRIFT = ("create", "configure", "extend", "refused")


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is between a declared topic and the cluster.

    action: `create`, `configure` (settings) and `extend` (more partitions) are what `apply` does; `refused` is what
        it never does; `faust` (made by the statistics agent) and `undeclared` topics are only listed.
    partitions, configs: what is to be set, as far as the action is about it.
    """

    topic: str
    action: Action
    detail: str
    partitions: int = 0
    configs: Mapping[str, str] = field(default_factory=dict)

    @property
    def drift(self) -> bool:
        """Whether the cluster is not as declared."""
        return self.action in _DRIFT


async def diff(bus: Bus, declared: Sequence[Topic]) -> list[Change]:
    """The changes in the order of the declarations, then the topics that nobody declared."""
    present = await bus.topics()
    changes = [change for topic in declared for change in _of(topic, present.get(topic.name))]
    names = {topic.name for topic in declared}
    for name in sorted(present.keys() - names):
        if is_faust(name):
            changes.append(Change(topic=name, action="faust", detail="made by the statistics agent, left as it is"))
        else:
            changes.append(Change(topic=name, action="undeclared", detail="not in topics/, left as it is"))
    return changes


async def apply(
    bus: Bus,
    changes: Sequence[Change],
    *,
    dry_run: bool = False,
    replication_factor: int = 1,
    clock: Clock | None = None,
) -> list[Change]:
    """Makes the changes that can be made; those that were, or with `dry_run` would be, made.

    They can be seen when it returns. Raises `BusError` when they cannot after `_VISIBLE_SECONDS`.
    """
    made = []
    for change in changes:
        if change.action not in ("create", "configure", "extend"):
            continue
        if not dry_run and not await _make(bus, change, replication_factor):
            continue
        made.append(change)
    if not dry_run:
        await _seen(bus, made, clock or SystemClock())
    return made


def is_faust(name: str) -> bool:
    """Whether Faust makes a topic of this name: its tables' changelogs, and those named after its app."""
    return name.endswith("-changelog") or name.startswith(FAUST_APP)


async def _make(bus: Bus, change: Change, replication_factor: int) -> bool:
    """False where another process was first."""
    if change.action == "create":
        topic = TopicDescription(name=change.topic, partitions=change.partitions, configs=change.configs)
        return await bus.create_topic(topic, replication_factor=replication_factor)
    if change.action == "extend":
        await bus.add_partitions(change.topic, change.partitions)
    else:
        await bus.alter_topic(change.topic, change.configs)
    return True


async def _seen(bus: Bus, made: Sequence[Change], clock: Clock) -> None:
    """Waits until the broker shows what its controller has confirmed: its own view of the metadata lags a little."""
    deadline = clock.monotonic() + _VISIBLE_SECONDS
    while made:
        present = await bus.topics()
        late = [change for change in made if not _holds(change, present.get(change.topic))]
        if not late:
            return
        if clock.monotonic() > deadline:
            raise BusError(
                f"the cluster confirmed a change and does not show it after {_VISIBLE_SECONDS:g} s",
                retriable=True,
                hint="look at the broker's log; `megaflow topics diff` shows what is there",
                topic=late[0].topic,
            )
        await clock.sleep(0.05)


def _holds(change: Change, present: TopicDescription | None) -> bool:
    if present is None:
        return False
    if change.action == "configure":
        return all(present.configs.get(name) == value for name, value in change.configs.items())
    return present.partitions >= change.partitions


def _of(topic: Topic, present: TopicDescription | None) -> list[Change]:
    if present is None:
        detail = f"{_count(topic.partitions)}, {topic.cleanup}"
        return [
            Change(
                topic=topic.name,
                action="create",
                detail=detail,
                partitions=topic.partitions,
                configs=topic.configs(),
            )
        ]
    changes = []
    if topic.partitions > present.partitions:
        keyed = f"; records with a {topic.key} move to other partitions from then on" if topic.key else ""
        changes.append(
            Change(
                topic=topic.name,
                action="extend",
                detail=f"{present.partitions} -> {_count(topic.partitions)}{keyed}",
                partitions=topic.partitions,
            )
        )
    elif topic.partitions < present.partitions:
        changes.append(
            Change(
                topic=topic.name,
                action="refused",
                detail=f"has {_count(present.partitions)}, declared {topic.partitions}: partitions never shrink; "
                f"declare {present.partitions}, or make a topic of another name",
                partitions=present.partitions,
            )
        )
    was = present.configs
    different = {name: value for name, value in topic.configs().items() if was.get(name) != value}
    if different:
        detail = ", ".join(f"{name} {was.get(name, 'the default')} -> {value}" for name, value in different.items())
        # All of them: Kafka's AlterConfigs sets back to the default what it is not told.
        configs = {**was, **topic.configs()}
        changes.append(Change(topic=topic.name, action="configure", detail=detail, configs=configs))
    return changes


def _count(partitions: int) -> str:
    return f"{partitions} partition{'' if partitions == 1 else 's'}"
