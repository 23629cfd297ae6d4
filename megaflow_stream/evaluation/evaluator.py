"""The evaluator: follows the topic `checkpoints`, evaluates each checkpoint, promotes the best.

    1. A producer with the transactional id `megaflow.evaluate.NAME`: InitProducerId fences an older evaluator of that
       name and waits for the end of its transaction. Only then is the committed position true.
    2. The group's committed position; what `evaluations` says is promoted. An alias that is behind (a crash between 5
       and 6) is moved now.
    3. The next checkpoint, held: from now on no prune takes it, or it is gone already (`checkpoint.hold`). The cut, at
       what is committed of the validation topic now.
    4. Its loss. Where the cut moved since the incumbent was evaluated, the incumbent's too.
    5. Results and position in one transaction.
    6. The alias, If-Match. `evaluations` is the truth; the alias follows it.

The hold stays until the next checkpoint's, and so also over a crash between 5 and 6; the incumbent is kept by the alias
until 6. So what is promoted is there.

Any error throws producer and reader away and begins again at 1, after a while; being fenced ends the evaluator. What
cannot be evaluated (pruned, damaged, of another model) has a result too, with a null loss and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson
import torch
from torch import nn

from megaflow_stream import checkpoint, faults
from megaflow_stream.bus.api import Bus, Producer, Reader, Record, TopicPartition, json_headers
from megaflow_stream.checkpoint import MODEL, Hold, ManifestRef, alias
from megaflow_stream.clock import Clock, SystemClock
from megaflow_stream.definitions.trainer import Evaluation, Trainer
from megaflow_stream.errors import Damaged, Fenced, MegaflowError, NotFound
from megaflow_stream.evaluation import cut as cuts
from megaflow_stream.evaluation.evaluate import Measured, OtherTokenizer, evaluate
from megaflow_stream.evaluation.history import Result, promoted
from megaflow_stream.evaluation.load import DoesNotFit, put_into
from megaflow_stream.evaluation.promotion import Verdict, decide
from megaflow_stream.observe.stall import Stall
from megaflow_stream.observe.status import StatusWriter
from megaflow_stream.storage.api import ObjectStore

log = logging.getLogger(__name__)

_HEADERS = json_headers("megaflow.evaluation/1")
FETCH_SECONDS = 0.25
COMMIT_SECONDS = 6 * 3600.0  # a broker forgets a group's offsets after offsets.retention.minutes, by default 7 days
AGAIN_SECONDS = (0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class Topics:
    """Where an evaluator reads and writes."""

    checkpoints: str = "checkpoints"
    evaluations: str = "evaluations"


class Evaluator:
    """One evaluation of one trainer. `run` until stopped.

    stop: set to end; what is half evaluated then is evaluated again next time.
    """

    def __init__(
        self,
        bus: Bus,
        store: ObjectStore,
        evaluation: Evaluation,
        trainer: Trainer,
        *,
        status: StatusWriter | None = None,
        topics: Topics | None = None,
        device: torch.device | None = None,
        clock: Clock | None = None,
    ) -> None:
        if evaluation.trainer != trainer.name:
            raise ValueError(f"the evaluation is of {evaluation.trainer}, not of {trainer.name}")
        self.bus, self.store, self.evaluation, self.trainer = bus, store, evaluation, trainer
        self.topics = topics or Topics()
        self.group = f"megaflow.evaluate.{evaluation.name}"
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.evaluated = 0
        self._status, self._clock = status, clock or SystemClock()
        self._model: nn.Module | None = None
        self._best: Result | None = None
        self._alias: alias.Alias | None = None
        self._hold = Hold(store, trainer.name, f"{evaluation.alias}.candidate")
        self._nonce = secrets.token_hex(8)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`, over outages of broker and store. Raises `Fenced`, and what another try cannot mend."""
        tries = 0
        while not stop.is_set():
            done = self.evaluated
            try:
                await self._until(stop)
            except Fenced:
                raise
            except MegaflowError as error:
                if not error.retriable:
                    raise
                tries = 1 if self.evaluated > done else tries + 1
                seconds = AGAIN_SECONDS[min(tries, len(AGAIN_SECONDS)) - 1]
                log.warning("%s; again in %.1f s", error, seconds)
                await self._say("waiting", error=str(error))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), seconds)

    async def _until(self, stop: asyncio.Event) -> None:
        """Steps 1 and 2, then checkpoint after checkpoint."""
        producer = await self.bus.producer(self.group)  # 1
        reader: Reader | None = None
        try:
            place = TopicPartition(self.topics.checkpoints, 0)
            committed = (await self.bus.committed(self.group)).get(place)  # 2
            if committed is None:
                committed = (await self.bus.begin_offsets([place]))[place]
            await self._catch_up()
            await self._say("idle", **self._figures())
            reader = await self.bus.reader()
            reader.assign({place: committed})
            committed_at, stall = -math.inf, Stall(self.bus, self._clock)
            while not stop.is_set():
                fetched = await reader.fetch(timeout_seconds=FETCH_SECONDS, max_records=16)  # 3
                for record in fetched.get(place, ()):
                    if not await self._one(producer, record, stop):
                        return
                    committed = record.offset + 1
                position = await reader.position(place)
                await stall.look({place: position})
                again = self._clock.monotonic() - committed_at > COMMIT_SECONDS
                if position > committed or again:
                    # Past the markers of transactions, so that an evaluator with nothing to do has no lag.
                    await self._commit(producer, (), position)
                    committed, committed_at = position, self._clock.monotonic()
        finally:
            if reader is not None:
                await reader.close()
            await producer.close()

    async def _catch_up(self) -> None:
        """What is promoted by `evaluations`; the alias is moved there where a crash came between."""
        job, name = self.trainer.name, self.evaluation.alias
        self._best = await promoted(self.bus, self.topics.evaluations, job, self.evaluation.name)
        self._alias = await alias.get(self.store, job, name)
        await self._hold.open()
        if self._best is not None and (self._alias is None or self._alias.manifest != self._best.checkpoint.manifest):
            if await self.store.head(self._best.checkpoint.manifest) is None:
                log.warning("%s: the promoted checkpoint of step %d is gone", job, self._best.checkpoint.step)
                self._best = replace(self._best, gone=True)  # the next one takes its place
                return
            log.info("%s: the alias %s follows to step %d", job, name, self._best.checkpoint.step)
            await self._promote(self._best)

    async def _one(self, producer: Producer, record: Record, stop: asyncio.Event) -> bool:
        """Steps 4 to 6 for one record; False when it was stopped on the way."""
        ref = self._checkpoint_of(record)
        results: list[Result] = []
        if ref is not None:
            log.info("evaluating step %d", ref.step)
            await self._say("running", step=ref.step)
            work = asyncio.create_task(self._results(ref))
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return False
                results = work.result()  # 4
            finally:
                for task in (work, stopped):
                    task.cancel()
                await asyncio.gather(work, stopped, return_exceptions=True)
        step = ref.step if ref else -1
        faults.reach("evaluator.before_commit", step=step)
        await self._commit(producer, results, record.offset + 1)  # 5
        faults.reach("evaluator.after_commit", step=step)
        if results:
            last = results[-1]
            if last.best:
                await self._promote(last)  # 6
                self._best = last
            elif len(results) > 1:
                self._best = results[0]
            self.evaluated += 1
            log.info("step %d: validation loss %s; %s", step, _shown(last.measured.loss), last.reason)
            await self._say("idle", **self._figures(last))
        return True

    def _checkpoint_of(self, record: Record) -> ManifestRef | None:
        try:
            raw = orjson.loads(record.value or b"")
            if raw["job"] != self.trainer.name:
                return None
            if checkpoint.names.parse_manifest(raw["manifest"]) is None:
                raise ValueError(f"{raw['manifest']!r} is no manifest's key")
            return ManifestRef(raw["manifest"], raw["manifest_sha256"], int(raw["step"]))
        except (ValueError, KeyError, TypeError) as error:
            log.warning("not a checkpoint's record (offset %d): %s", record.offset, error)
            return None

    async def _results(self, ref: ManifestRef) -> list[Result]:
        """The candidate's result last; before it the incumbent's, where it was evaluated again."""
        there = await self._hold.take(ref)
        cut = await cuts.take(self.bus, self.trainer.validation)
        candidate = await self._result(ref, cut) if there else self._unmeasured(ref, cut, "gone")
        decision = decide(self._best.score if self._best else None, candidate.score)
        before: list[Result] = []
        if decision.verdict is Verdict.AGAIN and self._best is not None:
            again = await self._result(self._best.checkpoint, cut)
            again = replace(again, best=not again.gone, reason=again.reason or decision.reason)
            before = [again]
            decision = decide(again.score, candidate.score)
        reason = candidate.reason if candidate.gone else decision.reason
        return [*before, replace(candidate, best=decision.verdict is Verdict.PROMOTE, reason=reason)]

    async def _result(self, ref: ManifestRef, cut: dict[str, int]) -> Result:
        """Loads and evaluates one checkpoint; what cannot be loaded is a result as well."""
        try:
            loaded = await checkpoint.load(self.store, self.trainer.name, ref.manifest, kinds=MODEL)
            model = await asyncio.to_thread(self._filled, loaded.tensors)
        except NotFound:
            return self._unmeasured(ref, cut, "gone")
        except (Damaged, DoesNotFit) as error:
            return self._unmeasured(ref, cut, f"{type(error).__name__}: {error}")
        try:
            measured = await evaluate(
                self.bus,
                self.trainer,
                model,
                cut,
                micro_slice=self.evaluation.micro_slice,
                tokenizer=loaded.manifest.definition.get("tokenizer"),
                device=self.device,
                clock=self._clock,
            )
        except OtherTokenizer as error:
            return self._unmeasured(ref, cut, str(error))
        return replace(self._unmeasured(ref, cut, ""), measured=measured, gone=False)

    def _unmeasured(self, ref: ManifestRef, cut: dict[str, int], reason: str) -> Result:
        return Result(
            job=self.trainer.name,
            evaluation=self.evaluation.name,
            checkpoint=ref,
            cut=cut,
            measured=Measured(),
            best=False,
            reason=reason,
            at_ms=int(self._clock.now() * 1000),
            gone=True,
        )

    def _filled(self, tensors: Iterable[tuple[checkpoint.TensorSpec, memoryview]]) -> nn.Module:
        """The trainer's model with these weights: built once, filled again for each checkpoint."""
        if self._model is None:
            torch.set_num_threads(self.trainer.threads_per_rank)
            model: nn.Module = self.trainer.build_model()
            self._model = model.to(self.device)
        put_into(self._model, tensors)
        return self._model

    async def _commit(self, producer: Producer, results: Iterable[Result], position: int) -> None:
        """Results and position, whole or not at all."""
        await producer.begin()
        sent: list[asyncio.Future[Any]] = [
            await producer.send(self.topics.evaluations, result.to_json(), key=result.job.encode(), headers=_HEADERS)
            for result in results
        ]
        place = TopicPartition(self.topics.checkpoints, 0)
        await producer.send_offsets(self.group, {place: position})
        await producer.commit(sent)

    async def _promote(self, result: Result) -> None:
        said = {
            "evaluation": self.evaluation.name,
            "validation_loss": result.measured.loss,
            "cut": result.cut,
            "reason": result.reason,
            "at_ms": result.at_ms,
            "evaluator": self._nonce,
        }
        job, name = self.trainer.name, self.evaluation.alias
        self._alias = await alias.move(self.store, job, name, result.checkpoint, self._alias, said)

    def _figures(self, last: Result | None = None) -> dict[str, Any]:
        figures: dict[str, Any] = {"evaluated": self.evaluated}
        if last is not None:
            figures |= {
                "step": last.checkpoint.step,
                "validation_loss": last.measured.loss,
                "validation_records": last.measured.records,
                "reason": last.reason,
            }
        if self._best is not None:
            figures |= {
                "promoted_step": self._best.checkpoint.step,
                "promoted_checkpoint": self._best.checkpoint.manifest,
                "promoted_loss": self._best.measured.loss,
            }
        return figures

    async def _say(self, state: str, **numbers: Any) -> None:
        if self._status is not None:
            await self._status.update(state, **numbers)


def _shown(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.4f} nats/token"
