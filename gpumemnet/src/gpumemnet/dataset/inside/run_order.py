"""The order of the runs: who starts beside whom, who must wait, who is run alone, and when it ends."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import memory_reservation  # type: ignore[import-not-found]
import workers  # type: ignore[import-not-found]

GRACE_S = 20.0  # after the limit, for runs that had begun
ALONE_BATCH = 12  # so many wait to run alone before the others are let out for them
ALONE_S = 4.0  # for each of them, towards the end of the time
DRAIN_S = 6.0  # until those that train are gone: a few seconds each
BENCH_SHARE = 0.1  # of the card's memory: the contexts of those that have no room yet may take so much
BENCH_LEAST = 2
TELL_S = 5.0
MIB = 1 << 20


class Course:
    """Runs side by side, as many as memory and --parallel allow.

    A run has its room from `go` on. Making a context takes about as long as training and needs little memory, so some
    stand ready at any time: the bench.
    """

    def __init__(
        self, args: Any, kept: Any, queue: list[dict[str, Any]], capacity_mib: float, numbers: Any, began_s: float
    ) -> None:
        self.args, self.kept, self.capacity_mib, self.began_s = args, kept, capacity_mib, began_s
        self.parallel = int(args.parallel)
        self.margins = memory_reservation.Margins()
        self.queue = self.arranged(queue)
        self.alone: list[dict[str, Any]] = []
        self.alone_goes_on = False
        self.total = len(queue)
        work = {name: getattr(args, name) for name in ("device", "steps", "activity", "window_s", "config_limit_s")}
        work["uuid"] = args.uuid
        self.crew: Any = workers.Crew(work, numbers, self.take)
        self.first_s = time.monotonic()
        self.told_s = self.first_s

    def arranged(self, queue: list[dict[str, Any]]) -> Any:
        by_memory = int(self.capacity_mib * BENCH_SHARE / memory_reservation.CONTEXT_MIB)
        self.bench = max(BENCH_LEAST, min(self.parallel // 2, by_memory))
        return memory_reservation.Lanes(queue, self.capacity_mib - self.bench * memory_reservation.CONTEXT_MIB)

    def run(self) -> None:
        while self.crew.children or ((self.queue or self.alone) and not self.is_late()):
            if self.is_late():
                self.stop_waiting()
            else:
                self.start_more()
            self.grant()
            self.crew.look()
            if time.monotonic() - self.told_s > TELL_S:
                self.tell()

    def start_more(self) -> None:
        if self.is_time_for_alone():
            self.clear_bench()
            if not self.crew.children:
                config = self.alone.pop(0)
                self.crew.start(config, self.margins.needed_mib(config), True)
            return
        if any(child.alone for child in self.crew.children):
            return
        while self.queue and self.has_place():
            lane, config = self.next_config()
            need_mib = self.margins.needed_mib(config)
            if need_mib > self.room_mib * memory_reservation.ALONE_SHARE:
                self.alone.append(config)
            else:
                self.crew.start(config, need_mib, False).lane = lane

    def clear_bench(self) -> None:
        """Those that have no room yet begin again later: their turn may be long in coming, and the card is to empty."""
        for child in (bench := self.crew.among("starting", "waiting")):
            self.queue.put_back(child.lane, child.config)
        self.crew.end(bench)

    def has_place(self) -> bool:
        at_work = len(self.crew.children) - len(self.crew.among("waiting"))
        return at_work < self.parallel and sum(self.begun().values()) < self.bench

    def next_config(self) -> tuple[str, dict[str, Any]]:
        lane, config = self.queue.take(self.begun())
        return lane, config

    @property
    def room_mib(self) -> float:
        return float(self.queue.capacity_mib)

    def begun(self) -> dict[str, int]:
        bench = self.crew.among("starting", "waiting")
        return {lane: sum(child.lane == lane for child in bench) for lane in memory_reservation.LANES}

    def is_time_for_alone(self) -> bool:
        """Nothing else is left, enough of them have gathered, or the time is just enough for them."""
        if not self.alone or any(child.alone for child in self.crew.children):
            return False
        if not self.crew.children and self.alone_goes_on:
            return True
        left_s = self.args.limit_s - (time.monotonic() - self.began_s)
        is_short = left_s < ALONE_S * len(self.alone) + DRAIN_S
        nothing_else = not self.queue and not self.crew.among("starting", "waiting")
        self.alone_goes_on = nothing_else or len(self.alone) >= ALONE_BATCH or is_short
        return self.alone_goes_on

    def grant(self) -> None:
        """Those whose context has been weighed go on as there is room for them."""
        waiting, begun = self.crew.weighed("waiting"), self.begun()
        used_mib = sum(child.need_mib for child in self.crew.among("running", "over"))
        alone = [child for child in waiting if child.alone]
        self.let_go(alone or self.queue.admit(waiting, used_mib, begun))

    def let_go(self, children: list[Any]) -> None:
        for child in children:
            child.enter("running")
            child.tell("go")

    def take(self, child: Any, row: dict[str, Any]) -> None:
        again = row.pop("again", False)
        if row.get("footprint") and not row["oom"]:
            self.margins.learn(child.config, row["footprint"] / MIB)
        if again and not child.alone:
            self.alone.append(child.config)
        else:
            self.kept.write({"id": child.config["id"], "of": child.config["of"], **row, "alone": child.alone})
        self.leave(child)

    def leave(self, child: Any) -> None:
        child.dismiss()

    def is_late(self) -> bool:
        return time.monotonic() - self.began_s > float(self.args.limit_s)

    def stop_waiting(self) -> None:
        """Whoever has not begun is let go; the others have a little time."""
        over = time.monotonic() - self.began_s > self.args.limit_s + GRACE_S
        self.crew.end(self.crew.children if over else self.crew.among("starting", "waiting"))

    def tell(self) -> None:
        self.told_s = time.monotonic()
        done, took_s = self.kept.written, self.told_s - self.first_s
        kinds = f"{self.kept.measured} measured, {self.kept.oom} out of memory, {self.kept.failed} failed"
        rate = done / max(took_s, 1e-9)
        left = self.total - done
        print(f"{done} of {self.total} in {took_s:.0f} s ({rate:.1f}/s): {kinds}, {left} left", flush=True)


class Turns(Course):
    """For activity: some are prepared side by side, then each trains alone on the card while the others stand still.

    Those that stand still hold only what lasts from step to step, so many can. Nobody comes or leaves while one is
    watched. Who found no room among them waits, and is the first when they are gone.
    """

    is_turning = False

    def arranged(self, queue: list[dict[str, Any]]) -> deque[dict[str, Any]]:
        return deque(queue)

    @property
    def room_mib(self) -> float:
        return self.capacity_mib

    def clear_bench(self) -> None:
        """Nobody leaves: they are prepared and watched before the card empties."""

    def stop_waiting(self) -> None:
        """Who has no room stands still until the others have been watched: processes that end would disturb them."""
        if not self.crew.among("running", "prepared", "settling", "resting", "turning"):
            super().stop_waiting()
        elif time.monotonic() - self.began_s > self.args.limit_s + GRACE_S:
            self.crew.end(self.crew.children)

    def has_place(self) -> bool:
        return not self.is_turning and len(self.crew.children) < self.parallel

    def next_config(self) -> tuple[str, dict[str, Any]]:
        return memory_reservation.LANES[0], self.queue.popleft()

    def leave(self, child: Any) -> None:
        if not self.is_turning:
            child.dismiss()

    def grant(self) -> None:
        among = self.crew.among
        for child in self.crew.weighed("prepared"):
            if child.footprint is not None:
                child.need_mib = child.footprint / MIB
            child.enter("settling")
            child.tell("rest")
        for child in self.crew.children:
            child.held_mib = held_mib(child)
        if not self.is_turning:
            waiting, busy = self.crew.weighed("waiting"), among("running", "prepared", "settling", "over")
            if not self.is_late():
                self.let_go(memory_reservation.admit_to_turns(waiting, busy, among("resting"), self.free_mib()))
            stands_still = all(child.is_weighed for child in self.crew.children)
            is_ready = stands_still and not among("starting", "running", "settling")
            self.is_turning = is_ready and bool(among("resting"))
        if self.is_turning and not among("turning") and not any(child.is_dismissed for child in self.crew.children):
            self.give_turn()

    def give_turn(self) -> None:
        """To one whose peak fits; those that are over leave when none does, or nobody is left."""
        resting, over = self.crew.among("resting"), self.crew.among("over")
        fitting = [child for child in resting if child.need_mib - child.held_mib <= self.free_mib()]
        if fitting or (resting and not over):
            child = (fitting or resting)[0]
            child.enter("turning")
            child.tell("turn")
            return
        for child in over:
            child.dismiss()
        self.is_turning = bool(resting)

    def free_mib(self) -> float:
        return self.capacity_mib - float(sum(child.held_mib for child in self.crew.children))


def held_mib(child: Any) -> float:
    """As it was weighed when it last stood still; where that is not known, all that it may take."""
    if child.weight is not None:
        return float(child.weight / MIB)
    return float(
        memory_reservation.CONTEXT_MIB if child.state in ("starting", "waiting", "running") else child.need_mib
    )
