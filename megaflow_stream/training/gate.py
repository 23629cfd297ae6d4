"""`policy: sync`: after a checkpoint no step is trained before its evaluation stands on `evaluations`.

The rule asks nothing but the head: while a sync evaluation has no record of the head's manifest, the ranks wait. So it
holds after a restart as well. What an evaluator could not evaluate has a record too, so that only an evaluator that is
away keeps the gate shut; then what is waited for says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from megaflow_stream.bus.api import Bus, Record
from megaflow_stream.clock import Clock
from megaflow_stream.errors import MegaflowError
from megaflow_stream.observe.status import FINAL, read_status
from megaflow_stream.training.follow import follow

LOOK_SECONDS = 5.0  # between looks at `status` for the evaluators that are waited for

TOPIC = "evaluations"


class Gate:
    """One job's gate. `follow` and `look` run in the leader's loop, `missing` and `wanted` are asked by the ranks'.

    evaluations: names of the evaluations that gate the job.
    """

    def __init__(self, bus: Bus, job: str, evaluations: Sequence[str], clock: Clock) -> None:
        self.bus, self.job, self.evaluations, self.clock = bus, job, evaluations, clock
        self._done: set[tuple[str, str]] = set()  # (evaluation, manifest)
        self._away: frozenset[str] = frozenset()
        self._waiting = False

    async def follow(self) -> None:
        """Keeps what has been evaluated; for ever."""
        await follow(self.bus, TOPIC, self._take, self.clock)

    async def look(self) -> None:
        """Keeps which evaluators run while the gate is shut; for ever."""
        while True:
            await self.clock.sleep(LOOK_SECONDS)
            if not self._waiting:
                continue
            try:
                status = await read_status(self.bus, clock=self.clock)
            except MegaflowError:
                continue  # the broker is away: what is known stays
            alive = {name for name, s in status.items() if not s["stale"] and s.get("state") not in FINAL}
            self._away = frozenset(e for e in self.evaluations if f"evaluator/{e}" not in alive)

    def waits_for(self, step: int, manifest: str | None) -> str:
        """What the ranks wait for, in words; empty when the gate is open.

        manifest: of the head; None while the checkpoint of `step` is still being stored."""
        missing = [e for e in self.evaluations if manifest is None or (e, manifest) not in self._done]
        self._waiting = bool(missing) and manifest is not None
        if not missing:
            return ""
        away = [e for e in missing if e in self._away] if self._waiting else []
        text = f"the evaluation of step {step}"
        if away:
            text += f"; no evaluator runs: start it with `megaflow evaluate {away[0]}`"
        return text

    def _take(self, record: Record) -> None:
        try:
            raw = orjson.loads(record.value or b"")
            if raw["job"] == self.job:
                self._done.add((str(raw["evaluation"]), str(raw["manifest"])))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return  # another writer's: it opens no gate
