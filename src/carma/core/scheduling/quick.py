"""The walk along the line for the one who only wants to know who starts now (walk.py is for those who read reasons).

The same turns, the same fence, the same choices; but a task is held against open doors only, what is kept of doors is
used again (doors.py), the fence is looked at when it would keep somebody out, and sentences are written for those who
start. A pass in which nobody could start is not repeated until something that it depended on has changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import islice
from math import inf

from msgspec.structs import replace

from carma.core.model.events import TaskPlaced
from carma.core.model.values import AttemptKey, Demand, GpuId, TaskId
from carma.core.scheduling.decision import Ask, Refusal
from carma.core.scheduling.doors import asked_by, door_at, door_told, fence_holds, refreshed, reserved, still_nobody
from carma.core.scheduling.fair_order import InTurn
from carma.core.scheduling.fairness import wanted_by
from carma.core.scheduling.gpu_view import GpuView, also_on
from carma.core.scheduling.kept import Asked, Doors, Kept, Nobody, Turn, Unopposed, shape_of
from carma.core.scheduling.placement import Choice, Ranked, conclude, opposes, rank
from carma.core.scheduling.policy import as_of
from carma.core.scheduling.reservation import Fence, free_at, in_the_way, spare_mib
from carma.core.scheduling.scheduling_pass import Due, newcomer, with_others
from carma.core.scheduling.urgency import Order, ordered
from carma.core.scheduling.verdicts import door_of
from carma.core.state import State

KEPT_VERDICTS = 16  # with each placement, so that `explain` can tell later; more would swell a large server's log
PLACED_AT_ONCE = 64  # of one pass; the shell asks again at once, so this bounds a pass and delays nobody

Fenced = Callable[[GpuId], Refusal | None]


def schedule(state: State, now: float) -> list[TaskPlaced]:
    """The placements that are due."""
    if not state.line or not state.gpus:
        return []
    doors = refreshed(state, now)
    if not doors.open:
        doors.nobody = None  # no need to know: no line, however it changes, gets through closed doors
        return []
    if still_nobody(state, doors, now):
        return []
    walk = QuickPass(state, now, doors)
    placed = walk.placements()
    doors.nobody = walk.nobody if not placed and not walk.in_vain and _lasts(walk) else None
    return placed


def _lasts(walk: QuickPass) -> bool:
    """Whether a pass in which nobody could start tells anything of the next one. Where the policy has a say of its own,
    it must have been its answers, or memory, that kept everybody out, and not the order of the line or the fence: those
    change by themselves."""
    if walk.state.policy.against is None:
        return True
    walk.nobody.as_of = (walk.doors.version, as_of(walk.now))
    return walk.fence is None and not walk.nobody.full


class QuickPass:
    """One walk along the line on a working copy of the doors."""

    def __init__(self, state: State, now: float, doors: Doors) -> None:
        self.state = state
        self.now = now
        self.doors = doors
        self.open = list(doors.open)
        self.most_mib = max(kept.free_mib for kept in self.open)  # or less, once somebody has joined
        self.joined: dict[GpuId, Kept] = {}  # doors that this pass has changed
        self.last_gpu = state.last_gpu
        self.first: Ask | None = None  # of the first that cannot start
        self.first_refused: set[GpuId] = set()  # to that one, by the policy
        self.behind = 0
        self.fence: Fence | None = None  # for the first, as soon as it matters
        self.keeps_out: Refusal | None = None  # what it says to those behind
        self.spare_mib: dict[GpuId, int] = {}  # on its GPUs, for tasks that outlast the reserved start
        self.in_vain: set[tuple[int, int, bool, float, Demand | None]] = set()  # what the policy found no GPU for
        self.refused: set[int] = set()  # numbers of those behind the first (kept.Asked); no GPU opens during a pass
        self.shut = False  # to all behind the first
        self.due = Due(state)
        self.started = self.due.started  # arrays: how many this pass has started
        self.nobody = Nobody(now)
        self.order = Order(state.line)
        self.overtaken: TaskId | None = None  # by the one whose turn it is now, before its time

    def placements(self) -> list[TaskPlaced]:
        placed: list[TaskPlaced] = []
        tasks, known, nobody = self.state.tasks, self.doors.asked, self.nobody
        order, depth = self._order(), self.state.rules.queue.backfill_depth
        for place, turn in enumerate(order):
            self.overtaken = self.order.overtaken_by(place)
            asked = known.get(turn[2]) or asked_by(self.state, self.doors, tasks[turn[2]])
            nobody.last = turn
            if not asked.plain and self._waits(asked):
                if isinstance(order, InTurn):
                    order.passed_over()
                    if self.due.tally.has_stopped(asked.task.owner):
                        order.leave_out(asked.task.owner.uid)
                continue
            if asked.number in self.refused:
                self.behind += 1
                start = None
            else:
                start = self._consider(asked)
            if start is not None:
                placed.append(start)
                if len(placed) >= PLACED_AT_ONCE:
                    break
            if not self.open or self.shut or (self.first is not None and self.behind >= depth):
                nobody.full = True
                break
        if self.shut:
            nobody.smallest_mib = -1  # those who were not looked at may ask for less
        if not placed and self.first is not None:
            nobody.behind = self.behind
            if self.fence is not None and not self.in_vain:
                fence_holds(self.state, self.doors, nobody, self.fence, self.now)
        return placed

    def _order(self) -> InTurn | list[Turn]:
        state, doors = self.state, self.doors
        if state.lanes is None:
            self.order = ordered(state, state.line, self.now)
            return self.order.line

        def cost(task_id: TaskId) -> float:
            asked = asked_by(state, doors, state.tasks[task_id])
            return state.accounts.ahead(asked.task.owner.name, wanted_by(asked.ask, self.due.largest_mib).cards)

        return InTurn(state.lanes, cost)

    def _waits(self, asked: Asked) -> bool:
        """Whether its turn cannot come, whatever the GPUs say; and what that depends on."""
        task, spec = asked.task, asked.task.spec
        if self.due.tally.has_stopped(task.owner):
            return True  # as long as nothing changes, which `fragile` stands for
        if spec.begin_at is not None and spec.begin_at > self.now:
            self.nobody.until = min(self.nobody.until, spec.begin_at)
        if spec.after or spec.array is not None or self.state.accounts.limited:
            self.nobody.fragile = True
        return not self.due.may_come(task, self.now)

    def _consider(self, asked: Asked) -> TaskPlaced | None:
        """Decide for one task, and change the working copy as if it had been done."""
        ask = asked.ask
        if self.first is not None:
            self.behind += 1
        if ask.memory_mib < self.nobody.smallest_mib:
            self.nobody.smallest_mib = ask.memory_mib
        if ask.memory_mib <= self.most_mib and ask.gpus <= len(self.open):
            placed = self._try(asked)
            if placed is not None:
                return placed
        if self.first is None:
            self.first = self._of_now(ask)
        else:
            self.refused.add(asked.number)
        return None

    def _try(self, asked: Asked) -> TaskPlaced | None:
        ask, fenced = asked.ask, None
        memory_mib, alone = ask.memory_mib, ask.alone
        if self._still_opposed(ask):
            return None
        found = [kept for kept in self.open if memory_mib <= kept.free_mib and not (alone and kept.taken)]
        if len(found) >= ask.gpus:
            some = self._that_matter(ask, found)
            found = self._unopposed(self._of_now(ask), some, all_of_them=len(some) == len(found))
        if self.first is not None and len(found) >= ask.gpus:
            fenced = self._keeper(asked)
            if fenced is not None:
                found = [kept for kept in found if fenced(kept.gpu.id) is None]
        shape = (ask.gpus, ask.memory_mib, ask.alone, asked.runtime_s if self.first is not None else -1.0, ask.demand)
        if len(found) < ask.gpus or shape in self.in_vain:
            return None
        opened = [door_at(self.state, kept, self.now).view for kept in found]
        ask = self._of_now(ask)
        refusals: dict[GpuId, Refusal] = {}
        last = self.state.gpus.get(self.last_gpu) if self.last_gpu is not None else None
        ranked = rank(
            ask,
            opened,
            self.state.policy,
            None if last is None else last.index,
            refusals,
            idle_first=self.state.rules.placement.idle_first,
        )
        if len(ranked) < ask.gpus:
            self.in_vain.add(shape)
            if self.first is None:
                self.first_refused = {gpu for gpu, refusal in refusals.items() if refusal.code == "Policy"}
            return None
        return self._place(asked, ranked, refusals, fenced)

    def _of_now(self, ask: Ask) -> Ask:
        """What is kept of an ask has no time, and a policy may look at it."""
        return ask if self.state.policy.against is None else replace(ask, at=as_of(self.now))

    def _still_opposed(self, ask: Ask) -> bool:
        """Whether the policy had something against all but too few GPUs a moment ago, and no door has changed since."""
        if self.state.policy.against is None or self.joined:
            return False
        known = self.doors.unopposed(as_of(self.now)).get(shape_of(ask))
        return known is not None and known.version == self.doors.version and len(known.gpus) < ask.gpus

    def _that_matter(self, ask: Ask, found: list[Kept]) -> list[Kept]:
        """Where idle GPUs go first and there are enough of them, the others have no chance: of those, only the ones are
        ranked that are written out with the decision. Not behind a fence, which may keep idle ones for another."""
        if self.first is not None or not (self.state.policy.apart and self.state.rules.placement.idle_first):
            return found
        empty = [kept for kept in found if not kept.taken]
        if sum(door_at(self.state, kept, self.now).view.idle for kept in empty) < ask.gpus:
            return found
        return [kept for kept in found if not kept.taken or kept.place < KEPT_VERDICTS]

    def _unopposed(self, ask: Ask, found: list[Kept], *, all_of_them: bool) -> list[Kept]:
        """Those that the policy has nothing against. Doors that have not changed are not held against it again."""
        state, policy = self.state, self.state.policy
        if policy.against is None:
            return found
        known = self.doors.unopposed(ask.at).setdefault(shape_of(ask), Unopposed())
        gpus = set(known.gpus)
        for kept in found:
            if kept.version > known.version or kept.gpu.id in self.joined:
                opposed = opposes(policy, ask, door_at(state, kept, self.now).view)
                (gpus.discard if opposed else gpus.add)(kept.gpu.id)
        if all_of_them and not self.joined:  # what this pass has changed is not so yet
            known.gpus, known.version = gpus, self.doors.version
        return [kept for kept in found if kept.gpu.id in gpus]

    def _place(
        self, asked: Asked, ranked: list[Ranked], refusals: dict[GpuId, Refusal], fenced: Fenced | None
    ) -> TaskPlaced:
        ask, task, now = asked.ask, asked.task, self.now
        choice = self._written_out(ask, ranked, refusals, fenced)
        decision = conclude(choice, self.state.policy.name, now)
        assert decision.placement is not None
        verdicts = tuple(sorted(decision.verdicts, key=lambda verdict: not verdict.chosen))
        key = AttemptKey(task.id, task.key.attempt + 1)
        placed = TaskPlaced(now, key, decision.placement, decision.reason, self._overtakes(choice), verdicts)
        self._apply(choice, asked.runtime_s)
        self.due.tally.gave(task.owner, wanted_by(ask, self.due.largest_mib))
        if task.spec.array is not None:
            array = task.spec.array.array
            self.started[array] = self.started.get(array, 0) + 1
        return placed

    def _written_out(
        self, ask: Ask, ranked: list[Ranked], refusals: dict[GpuId, Refusal], fenced: Fenced | None
    ) -> Choice:
        """With the chosen GPUs, and as many of the others as are kept."""
        chosen = {entry.gpu for entry in ranked[: ask.gpus]}
        others = (gpu for gpu in self.doors.by_gpu if gpu not in chosen)
        wanted = chosen.union(islice(others, max(0, KEPT_VERDICTS - len(chosen))))
        kept = sorted((self._kept(gpu) for gpu in wanted), key=lambda one: one.place)
        doors = tuple((door_at if one.gpu.id in chosen else door_told)(self.state, one, self.now) for one in kept)
        for door in doors:
            gpu = door.view.gpu.id
            refusal = door.refuse(ask) or (fenced(gpu) if fenced is not None else None)
            if refusal is None and gpu not in refusals:
                refusal = self.state.policy.objects(self._of_now(ask), door.view.holders)
            if refusal is not None:
                refusals[gpu] = refusal
        return Choice(ask=ask, doors=doors, refusals=refusals, ranked=tuple(ranked))

    def _kept(self, gpu: GpuId) -> Kept:
        return self.joined.get(gpu) or self.doors.by_gpu[gpu]

    def _apply(self, choice: Choice, runtime_s: float) -> None:
        holder = newcomer(choice.ask, runtime_s, self.state.rules, self.now)
        chosen = choice.chosen
        for door in choice.doors:
            gpu = door.view.gpu
            if gpu.id not in chosen:
                continue
            view = door.view.joined_by(with_others(holder, choice, door.view, self.state.policy))
            place = self.doors.by_gpu[gpu.id].place
            self.joined[gpu.id] = joined = Kept(gpu, place)
            joined.hold(door_of(view, self.state.rules, self.state.policy), self.now)
            where = bisect_left(self.open, place, key=lambda one: one.place)
            self.open[where : where + 1] = [] if joined.closed else [joined]
            self._look_at_spare(view)
        for name in chosen:
            self._tell_beside(door_at(self.state, self.joined[name], self.now).view)
        self.most_mib = max((kept.free_mib for kept in self.open), default=-1)
        self.last_gpu = chosen[-1]

    def _tell_beside(self, joined: GpuView) -> None:
        """Where those who have that GPU have others, too (walk.Pass does the same)."""
        for gpu in also_on(joined.holders) & self.doors.by_gpu.keys():
            kept = self._kept(gpu)
            told = Kept(kept.gpu, kept.place)
            door = door_at(self.state, kept, self.now)
            told.hold(replace(door, view=door.view.with_beside(joined)), self.now)
            self.joined[gpu] = told
            self.open = [told if one.gpu.id == gpu else one for one in self.open]

    # -- the fence --------------------------------------------------------------------------------------------------
    def _keeper(self, asked: Asked) -> Fenced | None:
        """The extra filter for a task behind the first that cannot start."""
        fence = self._fence_of_the_first()
        if fence.start_at is None or (fence.degree == 1 and self.now + asked.runtime_s <= fence.start_at):
            return None
        wanted_mib = inf if asked.ask.alone else asked.ask.memory_mib
        spare, keeps_out = self.spare_mib, self.keeps_out

        holder = newcomer(asked.ask, asked.runtime_s, self.state.rules, self.now)

        def check(gpu: GpuId) -> Refusal | None:
            if gpu not in spare:
                return None
            if wanted_mib > spare[gpu]:
                return keeps_out
            view = door_at(self.state, self._kept(gpu), self.now).view
            return keeps_out if in_the_way(fence, holder, view, self.state.policy) else None

        return check

    def _fence_of_the_first(self) -> Fence:
        """Nobody has come in since the first was refused, or this would have been asked before."""
        if self.fence is None:
            assert self.first is not None
            state, now = self.state, self.now
            found = [self._kept(gpu) for gpu in self.doors.by_gpu if gpu not in self.first_refused]
            self.fence = reserved(state, self.first, found, now)
            self.keeps_out = self.fence.refusal(now)
            if self.fence.degree > 1:  # nobody else
                self.spare_mib = dict.fromkeys(self.fence.gpus, -1)
                self.shut = all(kept.gpu.id in self.spare_mib for kept in self.open)
            else:
                for gpu in self.fence.gpus:
                    self._look_at_spare(door_at(state, self._kept(gpu), now).view)
        return self.fence

    def _look_at_spare(self, view: GpuView) -> None:
        if self.fence is not None and view.gpu.id in self.fence.gpus:
            rules, policy = self.state.rules, self.state.policy
            self.spare_mib[view.gpu.id] = spare_mib(self.fence, view, rules, policy, self.now)

    def _overtakes(self, choice: Choice) -> TaskId | None:
        """The first, if this placement takes a GPU that it could have used."""
        if self.fence is None:
            return self.overtaken
        ask, rules, policy = self.fence.ask, self.state.rules, self.state.policy
        chosen = choice.chosen
        for door in choice.doors:
            if door.view.gpu.id in chosen and free_at(ask, door, rules, policy, self.now) is not None:
                return ask.task
        return None
