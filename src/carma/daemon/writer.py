"""The one writer of the log: commit, step, hand out the commands that follow.

1. It takes the waiting changes, commits them in one transaction and steps them. A change is acknowledged when it is
   durable and stepped. An event that is not durable is never stepped.
2. It asks the core for proposals (placements, retries, stops) and commits those.
3. From time to time it saves a checkpoint, and notes what tasks and GPUs did.

It must not wait for anything but the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from carma.core.machine import step
from carma.core.model import events as e
from carma.core.model.commands import Command
from carma.core.model.values import TaskId
from carma.core.propose import propose
from carma.core.scheduling.verdict_cache import VerdictCache
from carma.core.telemetry import usage
from carma.daemon.daemon_log import ErrorLog, log_event
from carma.daemon.shell import Change, Shell
from carma.daemon.state_checkpoint import checkpoint, forget
from carma.errors import CarmaError, StoreError

log = logging.getLogger("carma.daemon")

Follow = Callable[[Sequence[Command], e.Durable], None]

CHECKPOINT_EVERY = 2_000  # events
BATCH = 512  # changes in one transaction
STEPS = 100  # events that are stepped without a pause
STORE_RETRY_S = 1.0  # pause before proposals are tried again after the store refused them
USAGE_S = 60.0  # between two notes of what tasks and GPUs did; a daemon that is killed loses at most this much
PROPOSAL_PAUSE_FACTOR = 3.0  # after proposals took t seconds, requests have the event loop for this many times t
SHORT_PROPOSAL_S = 0.002  # no pause follows proposals that took less


class Fatal(Exception):
    """The core cannot step a stored event. The state is no longer what the log gives, so the daemon must end."""


class Writer:
    """`follow` gets the commands of each event after it was stepped; it must not block."""

    def __init__(self, shell: Shell, follow: Follow) -> None:
        self._shell = shell
        self._follow = follow
        self._verdicts = VerdictCache()
        self._propose_at_s = 0.0  # monotonic
        self._checkpoint_at = shell.sequence + CHECKPOINT_EVERY
        self._usage_at_s = time.monotonic() + USAGE_S
        self._errors = ErrorLog()

    async def run(self) -> None:
        """Ends only by cancellation or with Fatal."""
        shell = self._shell
        while True:
            await shell.wake.wait()
            shell.wake.clear()
            await self._whole_turn()
            await asyncio.sleep(0)  # other tasks of the event loop run between two turns

    async def close(self) -> None:
        """Called after `run` was cancelled: saves a checkpoint, so that the next start is quick, and closes the
        shell."""
        try:
            if self._shell.failure is None:
                await self._note_usage()
                await self._save()
        except (StoreError, Fatal) as error:
            log.warning("the last checkpoint was not saved (%s); the next start replays the log instead", error)
        self._shell.close()

    async def _whole_turn(self) -> None:
        """A turn that is cancelled is finished first: otherwise `close` would save a state without events that are
        already stored."""
        turn = asyncio.ensure_future(self._turn())
        try:
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            await asyncio.wait((turn,))
            turn.result()
            raise

    async def _turn(self) -> None:
        shell = self._shell
        while shell.transient:
            self._step_transient(shell.transient.popleft())
        await self._flush()
        await self._propose()
        if shell.sequence >= self._checkpoint_at:
            await self._save_if_possible()
        if time.monotonic() >= self._usage_at_s:
            await self._note_usage()
        shell.answer_waiting()
        if shell.changes or shell.transient:
            shell.wake.set()

    # Changes.

    async def _flush(self) -> None:
        """One transaction with all waiting changes that do not concern the same tasks."""
        taken, events = self._take_changes()
        if not taken:
            return
        try:
            await self._commit(events)
        except (StoreError, Fatal) as error:
            for change in taken:
                change.end(error if isinstance(error, StoreError) else CarmaError(str(error)))
            if isinstance(error, Fatal):
                raise
            return
        for change in taken:
            change.end()

    def _take_changes(self) -> tuple[list[Change], list[e.Durable]]:
        """The changes of the next transaction, and their events."""
        taken: list[Change] = []
        events: list[e.Durable] = []
        later: list[Change] = []
        touched: set[TaskId | None] = set()
        changes = self._shell.changes
        while changes and len(taken) < BATCH:
            change = changes.popleft()
            made = self._events_of(change)
            subjects = {e.task_of(event) for event in made}  # None stands for the GPUs
            if not touched.isdisjoint(subjects):  # `make` is called again, on the state after this transaction
                later.append(change)
            elif made:
                touched |= subjects
                events.extend(made)
                taken.append(change)
        changes.extendleft(reversed(later))
        return taken, events

    def _events_of(self, change: Change) -> Sequence[e.Durable]:
        """Empty if nothing is left to commit for this change."""
        if change.done.done():  # its client has left
            return ()
        try:
            made = change.make(self._shell.state)
        except Exception as error:
            change.end(error)
            return ()
        if not made:
            change.end()
        return made

    async def _commit(self, events: Sequence[e.Durable]) -> None:
        """Store, then step. Raises StoreError with nothing changed, or Fatal.

        Events that report an attempt's energy are stored together with a note about all other attempts and the GPUs:
        the energy of the tasks equals that of the GPUs, whenever the daemon is killed.
        """
        shell = self._shell
        if any(isinstance(event, e.AttemptEnded | e.MemoryObserved) for event in events):
            note = usage.note(shell.state)
            events = [note, *events] if note.gpus else events
        try:
            last = await shell.in_store(lambda: shell.store.append(events))
        except StoreError as error:
            self._errors.error(f"not stored, so not done: {error}", kind="store")
            raise
        except Exception as error:
            log.exception("the store failed")
            raise StoreError(f"the database did not take the change: {type(error).__name__}: {error}") from error
        self._errors.over("store", "the database takes changes again")
        shell.sequence = last
        for sequence, event in enumerate(events, start=last - len(events) + 1):
            self._step(sequence, event)
            if sequence % STEPS == 0:
                await asyncio.sleep(0)  # an array is up to 10,000 events: requests are answered meanwhile

    def _step(self, sequence: int, event: e.Durable) -> None:
        shell = self._shell
        try:
            commands = step(shell.state, event)
        except Exception as error:
            log.exception("event %d cannot follow the earlier events: %r", sequence, event)
            reason = f"event {sequence} ({type(event).__name__}) is stored but cannot follow the earlier ones: {error}"
            shell.failure = CarmaError(reason)
            shell.fail_changes(shell.failure)
            raise Fatal(reason) from error
        try:
            log_event(event, shell.state)
            self._follow(commands, event)
            if shell.recorder is not None:
                shell.recorder.stepped(event, shell.state)
        except Exception:
            log.exception("the commands of event %d were not carried out: %r", sequence, event)
        if not isinstance(event, e.UseNoted):
            shell.publish(sequence, event)

    def _step_transient(self, event: e.Transient) -> None:
        try:
            step(self._shell.state, event)
        except Exception:
            log.exception("an observation could not be used and is left out: %r", event)

    # Proposals.

    async def _propose(self) -> None:
        """One round of proposals. Another turn follows until there are none."""
        started_s = time.monotonic()
        if not self._shell.reconciled.is_set() or started_s < self._propose_at_s:
            return
        events = self._proposals()
        took_s = time.monotonic() - started_s
        if self._shell.recorder is not None and self._shell.state.queue:
            self._shell.recorder.decided(took_s)
        pause_s = took_s * PROPOSAL_PAUSE_FACTOR if took_s > SHORT_PROPOSAL_S else 0.0
        if events:
            try:
                await self._commit(events)
            except StoreError:
                pause_s = STORE_RETRY_S
        if pause_s:
            self._propose_at_s = time.monotonic() + pause_s
            asyncio.get_running_loop().call_later(pause_s, self._shell.wake.set)
        elif events:
            self._shell.wake.set()

    def _proposals(self) -> list[e.Durable]:
        try:
            events = propose(self._shell.state, self._shell.clock.now(), self._verdicts)
        except Exception:
            log.exception("the scheduling pass failed; it is tried again with the next event")
            return []
        if self._shell.stopping.is_set():  # nothing new starts; ends are still recorded
            return [
                event for event in events if not isinstance(event, e.TaskPlaced | e.PreemptionRequested | e.TaskPaused)
            ]
        return events

    # Checkpoints and notes.

    async def _save_if_possible(self) -> None:
        try:
            await self._save()
        except Exception as error:
            self._checkpoint_at = self._shell.sequence + CHECKPOINT_EVERY // 10
            self._errors.error(f"no checkpoint was saved: {error}", kind="checkpoint")

    async def _save(self) -> None:
        shell = self._shell
        saved, finished = checkpoint(shell.state, shell.sequence)
        await shell.in_store(lambda: shell.store.save(saved, finished))
        forget(shell.state, finished)
        self._checkpoint_at = shell.sequence + CHECKPOINT_EVERY

    async def _note_usage(self) -> None:
        """Store what tasks and GPUs did since the last note. If the store refuses it, the next note includes it."""
        self._usage_at_s = time.monotonic() + USAGE_S
        note = usage.note(self._shell.state)
        if not note.gpus:
            return
        try:
            await self._commit([note])
        except StoreError as error:
            self._errors.error(f"the use of the GPUs was not noted: {error}", kind="usage")
        else:
            self._errors.over("usage", "the use of the GPUs is noted again")
