"""The order of the runs: who starts beside whom, who must wait, who is run alone, and when it ends."""

from __future__ import annotations

import time
from typing import Any

import crew  # type: ignore[import-not-found]
import room  # type: ignore[import-not-found]

GRACE_S = 20.0  # after the limit, for runs that had begun
ALONE_BATCH = 12  # so many wait to run alone before the others are let out for them
ALONE_S = 4.0  # for each of them, towards the end of the time
TELL_S = 5.0


class Course:
    """Runs side by side, as many as memory and --parallel allow."""

    def __init__(
        self, args: Any, kept: Any, queue: list[dict[str, Any]], capacity_mib: float, numbers: Any, began_s: float
    ) -> None:
        self.args, self.kept, self.capacity_mib, self.began_s = args, kept, capacity_mib, began_s
        self.margins = room.Margins()
        self.queue = self.arranged(queue)
        self.alone: list[dict[str, Any]] = []
        self.alone_goes_on = False
        self.parallel = int(args.parallel)
        self.total = len(queue)
        work = {name: getattr(args, name) for name in ("device", "steps", "activity", "window_s", "config_limit_s")}
        work["uuid"] = args.uuid
        self.crew: Any = crew.Crew(work, numbers, self.take)
        self.first_s = time.monotonic()
        self.told_s = self.first_s

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
            if not self.crew.children:
                self.start(self.alone.pop(0), alone=True)
            return
        if any(child.alone for child in self.crew.children):
            return
        while self.queue and len(self.crew.children) < self.parallel:
            used_mib = {lane: 0.0 for lane in self.queue.waiting}
            for child in self.crew.children:
                used_mib[child.lane] += child.need_mib
            found = self.queue.next(used_mib, self.margins)
            if found is None:
                return
            lane, config, need_mib = found
            if need_mib > self.capacity_mib * room.ALONE_SHARE:
                self.alone.append(config)
            else:
                self.crew.start(config, need_mib, False).lane = lane

    def arranged(self, queue: list[dict[str, Any]]) -> Any:
        return room.Lanes(queue, self.capacity_mib)

    def is_time_for_alone(self) -> bool:
        """Nothing else is left, enough of them have gathered, or the time is just enough for them."""
        if not self.alone or any(child.alone for child in self.crew.children):
            return False
        if not self.crew.children and self.alone_goes_on:
            return True
        left_s = self.args.limit_s - (time.monotonic() - self.began_s)
        is_short = left_s < ALONE_S * len(self.alone) + GRACE_S
        self.alone_goes_on = not self.queue or len(self.alone) >= ALONE_BATCH or is_short
        return self.alone_goes_on

    def start(self, config: dict[str, Any], alone: bool) -> Any:
        return self.crew.start(config, self.margins.needed_mib(config), alone)

    def grant(self) -> None:
        """Those whose context has been weighed go on: their room was kept when they started."""
        for child in self.crew.among("waiting"):
            child.enter("running")
            child.tell("go")

    def take(self, child: Any, row: dict[str, Any]) -> None:
        again = row.pop("again", False)
        if row.get("footprint") and not row["oom"]:
            self.margins.learn(child.config, row["footprint"] / (1 << 20))
        if again and not child.alone:
            self.alone.append(child.config)
        else:
            self.kept.write({"id": child.config["id"], **row, "alone": child.alone})
        if not self.args.activity:  # with it, all stand still until the group is done
            child.tell("end")

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
    """For activity: a group is prepared side by side, then each trains alone while the others stand still."""

    group = 0

    def arranged(self, queue: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return list(reversed(queue))  # the next is the last

    def start_more(self) -> None:
        if any(child.state != "over" for child in self.crew.children):
            return
        chosen = [self.alone.pop(0)] if self.is_time_for_alone() else self.next_group()
        self.group += 1
        for config in chosen:
            self.start(config, alone=len(chosen) == 1).group = self.group

    def next_group(self) -> list[dict[str, Any]]:
        ahead = self.queue[: -room.LOOK_AHEAD - 1 : -1]
        needs_mib = [self.margins.needed_mib(config) for config in ahead]
        places = room.choose_group(needs_mib, self.parallel, self.capacity_mib)
        for place in reversed(places):  # those nearest to the front first, so that the others stay where they are
            del self.queue[len(self.queue) - 1 - place]
        return [ahead[place] for place in places]

    def grant(self) -> None:
        """A group fits; it only waits until the one before it has left its memory."""
        crew = self.crew
        is_done = all(child.state == "over" for child in crew.children if child.group == self.group)
        for child in crew.among("over"):
            if is_done or child.group != self.group:
                child.tell("end")
        if all(child.group == self.group for child in crew.children):
            for child in crew.among("waiting"):
                child.enter("running")
                child.tell("go")
        if not crew.among("starting", "waiting", "running", "turning"):
            for child in crew.among("prepared")[:1]:
                child.enter("turning")
                child.tell("turn")
