"""The order of the runs: which run starts while others run, which waits, which runs alone, and when each ends."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import memory_reservation  # type: ignore[import-not-found]
import worker_pool  # type: ignore[import-not-found]

GRACE_S = 20.0  # after the limit, for runs that had begun
ALONE_BATCH = 12  # this many runs are waiting to run alone before the GPU is emptied for them
ALONE_S = 4.0  # for each of them, towards the end of the time
DRAIN_S = 6.0  # until those that train have ended
STANDBY_SHARE = 0.1  # of the GPU's memory that contexts without a reservation may use
STANDBY_MIN = 2
REPORT_S = 5.0
MIB = 1 << 20


class Schedule:
    """Runs side by side, as many as memory and --parallel allow.

    A run has its reservation from `go` on. Creating a context takes about as long as training and needs little memory,
    so some workers are on standby at any time: they have a context and wait for a reservation.
    """

    def __init__(
        self, args: Any, rows: Any, configs: list[dict[str, Any]], capacity_mib: float, numbers: Any, began_s: float
    ) -> None:
        self.args, self.rows, self.capacity_mib, self.began_s = args, rows, capacity_mib, began_s
        self.parallel = int(args.parallel)
        self.margins = memory_reservation.Margins()
        self.queue = self.arranged(configs)
        self.alone: list[dict[str, Any]] = []
        self.alone_goes_on = False
        self.total = len(configs)
        live = functools.partial(worker_pool.train_and_answer, args=args, numbers=numbers)
        self.pool: Any = worker_pool.WorkerPool(live, self.take, args.config_limit_s, args.uuid)
        self.first_s = time.monotonic()
        self.reported_s = self.first_s

    def arranged(self, configs: list[dict[str, Any]]) -> Any:
        by_memory = int(self.capacity_mib * STANDBY_SHARE / memory_reservation.CONTEXT_MIB)
        self.standby = max(STANDBY_MIN, min(self.parallel // 2, by_memory))
        return memory_reservation.Queues(configs, self.capacity_mib - self.standby * memory_reservation.CONTEXT_MIB)

    def run(self) -> None:
        while self.pool.workers or ((self.queue or self.alone) and not self.is_late()):
            if self.is_late():
                self.stop_waiting()
            else:
                self.start_more()
            self.grant()
            self.pool.poll()
            if time.monotonic() - self.reported_s > REPORT_S:
                self.report()

    def start_more(self) -> None:
        if self.is_time_for_alone():
            self.end_standby()
            if not self.pool.workers:
                config = self.alone.pop(0)
                self.pool.start(config, self.margins.needed_mib(config), True)
            return
        if any(worker.alone for worker in self.pool.workers):
            return
        while self.queue and self.has_place():
            queue, config = self.queue.take(self.begun())
            need_mib = self.margins.needed_mib(config)
            if need_mib > self.queue.capacity_mib * memory_reservation.ALONE_SHARE:
                self.alone.append(config)
            else:
                self.pool.start(config, need_mib, False).queue = queue

    def end_standby(self) -> None:
        """Workers without a reservation start again later: it may take long, and the GPU has to become empty."""
        for worker in (standby := self.pool.among("starting", "waiting")):
            self.queue.put_back(worker.queue, worker.config)
        self.pool.end(standby)

    def has_place(self) -> bool:
        at_work = len(self.pool.workers) - len(self.pool.among("waiting"))
        return at_work < self.parallel and sum(self.begun().values()) < self.standby

    def begun(self) -> dict[str, int]:
        standby = self.pool.among("starting", "waiting")
        return {queue: sum(worker.queue == queue for worker in standby) for queue in memory_reservation.QUEUES}

    def is_time_for_alone(self) -> bool:
        """Nothing else is left, ALONE_BATCH runs are waiting, or the time is just enough for them."""
        if not self.alone or any(worker.alone for worker in self.pool.workers):
            return False
        if not self.pool.workers and self.alone_goes_on:
            return True
        left_s = self.args.limit_s - (time.monotonic() - self.began_s)
        is_short = left_s < ALONE_S * len(self.alone) + DRAIN_S
        nothing_else = not self.queue and not self.pool.among("starting", "waiting")
        self.alone_goes_on = nothing_else or len(self.alone) >= ALONE_BATCH or is_short
        return self.alone_goes_on

    def grant(self) -> None:
        """Workers whose context has been measured train as soon as there is memory for them."""
        waiting = self.pool.read_among("waiting")
        used_mib = sum(worker.need_mib for worker in self.pool.among("running", "over"))
        alone = [worker for worker in waiting if worker.alone]
        self.let_train(alone or self.queue.admit(waiting, used_mib, self.begun()))

    def let_train(self, workers: list[Any]) -> None:
        for worker in workers:
            worker.enter("running")
            worker.send("go")

    def take(self, worker: Any, row: dict[str, Any]) -> None:
        again = row.pop("again", False)
        if row.get("footprint") and not row["oom"]:
            self.margins.learn(worker.config, row["footprint"] / MIB)
        if again and not worker.alone:
            self.alone.append(worker.config)
        else:
            self.rows.write({"id": worker.config["id"], "of": worker.config["of"], **row, "alone": worker.alone})
        self.leave(worker)

    def leave(self, worker: Any) -> None:
        worker.release()

    def is_late(self) -> bool:
        return time.monotonic() - self.began_s > float(self.args.limit_s)

    def stop_waiting(self) -> None:
        """Ends workers that have not begun to train; the others have GRACE_S."""
        over = time.monotonic() - self.began_s > self.args.limit_s + GRACE_S
        self.pool.end(self.pool.workers if over else self.pool.among("starting", "waiting"))

    def report(self) -> None:
        self.reported_s = time.monotonic()
        counts = self.rows.counts
        done, took_s = counts.total(), self.reported_s - self.first_s
        kinds = f"{counts['measured']} measured, {counts['oom']} out of memory, {counts['failed']} failed"
        rate = done / max(took_s, 1e-9)
        left = self.total - done
        print(f"{done} of {self.total} in {took_s:.0f} s ({rate:.1f}/s): {kinds}, {left} left", flush=True)


class ActivitySchedule(Schedule):
    """Schedule for measuring activity: some workers are prepared side by side, then each trains alone while the others
    stand still.

    A resting worker holds only what lasts from step to step, so many of them fit. No worker starts or ends while
    another one is measured. A worker that did not fit waits, and is the first when these have ended.
    """

    is_turning = False

    def arranged(self, configs: list[dict[str, Any]]) -> Any:
        return memory_reservation.Queues(configs, self.capacity_mib, heavy_share=math.inf)  # all in one queue

    def end_standby(self) -> None:
        """No worker ends here: all are prepared and measured before the GPU becomes empty."""

    def stop_waiting(self) -> None:
        """Workers without memory stay until the others have been measured: ending processes would disturb those."""
        if not self.pool.among("running", "prepared", "settling", "resting", "turning"):
            super().stop_waiting()
        elif time.monotonic() - self.began_s > self.args.limit_s + GRACE_S:
            self.pool.end(self.pool.workers)

    def has_place(self) -> bool:
        return not self.is_turning and len(self.pool.workers) < self.parallel

    def leave(self, worker: Any) -> None:
        if not self.is_turning:
            worker.release()

    def grant(self) -> None:
        among = self.pool.among
        for worker in self.pool.read_among("prepared"):
            if worker.footprint is not None:
                worker.need_mib = worker.footprint / MIB
            worker.enter("settling")
            worker.send("rest")
        for worker in self.pool.workers:
            worker.held_mib = held_mib(worker)
        if not self.is_turning:
            waiting, busy = self.pool.read_among("waiting"), among("running", "prepared", "settling", "over")
            if not self.is_late():
                self.let_train(memory_reservation.admit_to_turns(waiting, busy, among("resting"), self.free_mib()))
            stands_still = all(worker.is_read for worker in self.pool.workers)
            is_ready = stands_still and not among("starting", "running", "settling")
            self.is_turning = is_ready and bool(among("resting"))
        if self.is_turning and not among("turning") and not any(each.is_released for each in self.pool.workers):
            self.give_turn()

    def give_turn(self) -> None:
        """Gives the turn to a worker whose peak fits. If none fits, or none is left, the finished ones end."""
        resting, over = self.pool.among("resting"), self.pool.among("over")
        fitting = [worker for worker in resting if worker.need_mib - worker.held_mib <= self.free_mib()]
        if fitting or (resting and not over):
            worker = (fitting or resting)[0]
            worker.enter("turning")
            worker.send("turn")
            return
        for worker in over:
            worker.release()
        self.is_turning = bool(resting)

    def free_mib(self) -> float:
        return self.capacity_mib - float(sum(worker.held_mib for worker in self.pool.workers))


def held_mib(worker: Any) -> float:
    """Memory of the worker, read when it last stood still; if that is not known, the most that it may use."""
    if worker.last_footprint is not None:
        return float(worker.last_footprint / MIB)
    has_only_context = worker.state in ("starting", "waiting", "running")
    return float(memory_reservation.CONTEXT_MIB if has_only_context else worker.need_mib)
