"""`carma bench interference`: how tasks slow each other down, each alone, then in pairs, triples and quadruples.

Each workload has one process for the whole study (workers.py), so that a group takes its seconds and no start-up. While
a group runs, the GPU's activity is read over the same span. core/scheduling/sharing_model.py is fitted on the result.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Sequence

import msgspec

from carma.errors import Refused, Usage
from carma_lab.bench import results_file as written
from carma_lab.bench.gpu.environment import Study, StudyMachine, open_machine
from carma_lab.bench.gpu.progress import Guarding, Row, Sharing, by_percent, by_size, with_solo_rates
from carma_lab.bench.gpu.worker import TAIL_S
from carma_lab.bench.gpu.workers import Worker, WorkerDied
from carma_lab.bench.gpu.workloads import WORKLOADS

Group = tuple[str, ...]


def draw(names: Sequence[str], sizes: dict[int, int], seed: int) -> list[Group]:
    """`sizes` says how many groups of each size; within a size no group repeats, and tasks take part about equally."""
    chance = random.Random(seed)
    groups: list[Group] = []
    for size, wanted in sorted(sizes.items()):
        taken: dict[str, int] = dict.fromkeys(names, 0)
        seen: set[Group] = set()
        tries = 0
        while len(seen) < wanted and tries < 100 * wanted:
            tries += 1
            order = sorted(names, key=lambda name: taken[name] + chance.random() * 3)
            group = tuple(sorted(order[:size]))
            if group in seen:
                continue
            seen.add(group)
            groups.append(group)
            for name in group:
                taken[name] += 1
    return groups


WARM_S = 0.4
START_S = 20.0  # what starting a few more workers is reckoned to take
HEAVY = ("resnet50-224-b64-bf16", "vgg16-224-b32", "mlp-8192x4-b1024-bf16", "encoder-768x12-b16-bf16")
LIGHT = ("resnet18-cifar-b32", "mlp-512x4-b256", "encoder-256x4-b32")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`percent`: MPS thread percentages of the heavy tasks that share with light ones; each takes about a minute."""

    mechanism: str = "mps"  # or timeslice
    pairs: int = 70
    triples: int = 45
    quadruples: int = 35
    percent: tuple[int, ...] = ()
    seed: int = 1
    seconds: float = 1.6
    gpu: str | None = None
    limit_s: float = 900.0  # groups that would go beyond it are left out
    json: str = "interference.json"


def run(options: Options, machine: StudyMachine | None = None) -> int:
    """Measure and write; what was measured so far is on disk at any moment."""
    _check(options)
    with machine or open_machine() as there:
        if options.mechanism == "mps" and not there.has_mps:
            raise Refused("There is no nvidia-cuda-mps-control here.", "Measure without MPS: --mechanism timeslice.")
        study = InterferenceStudy(options, there)
        try:
            study.measure()
        finally:
            study.write()
    study.summarise()
    return 0


def _check(options: Options) -> None:
    written.check_place(options.json)
    if options.percent and options.mechanism != "mps":
        raise Usage("--percent is a matter of MPS; use --mechanism mps with it.")
    if not all(0 < percent < 100 for percent in options.percent):
        raise Usage("--percent takes whole numbers between 1 and 99, as in 25,50,75.")
    if not (options.percent or options.pairs or options.triples or options.quadruples):
        raise Usage("Nothing to measure: no groups and no percentages.")


class InterferenceStudy(Study):
    """One run: the rows so far, and the workers that have died."""

    def __init__(self, options: Options, machine: StudyMachine) -> None:
        super().__init__("interference", options, machine, WARM_S)
        self.rows: list[Row] = []
        self._dead: set[Worker] = set()

    def measure(self) -> None:
        """Alone, half the groups, alone, the other half, percentages, alone: so drift can be taken out."""
        groups = _groups(self._options)
        names = _who(groups, self._options)
        with self._machine.share(self._options.mechanism) as environment, contextlib.ExitStack() as stack:
            workers = self._by_name(names, environment, stack)
            written.say(f"{len(workers)} workers ready after {self._elapsed_s:.0f} s")
            alone = [[worker] for worker in workers.values()]
            self._each("alone", alone)
            shared = [[workers[name] for name in group] for group in groups if all(name in workers for name in group)]
            shared = shared[: self._affordable(len(workers))]
            self._each("groups", shared[: len(shared) // 2])
            self._each("alone", alone)
            self._each("groups", shared[len(shared) // 2 :])
            self._percentages(workers, environment)
            self._each("alone", alone)

    def write(self) -> None:
        """Writes the file with all that is needed to repeat the run."""
        rows = with_solo_rates(self.rows)
        more = {
            "mechanism": self._options.mechanism,
            "seed": self._options.seed,
            "reserved_mib": {name: int(answer["reserved_mib"]) for name, answer in self._ready.items()},
            "sharing": by_size(rows),
            "percentages": by_percent(rows),
            "rows": rows,
        }
        written.write(self._head() | more, self._options.json)

    def summarise(self) -> None:
        rows = with_solo_rates(self.rows)
        title = f"{self._gpu.name}, {self._options.mechanism}: progress against running alone"
        columns = ("tasks", "groups", "least", "median", "most", "worst-off slowed", "at most")
        written.print_table(title, columns, [_sharing_cells(line) for line in by_size(rows)])
        guarded = by_percent(rows)
        if guarded:
            title = "Light tasks beside heavy ones that are held to a share of the threads: speed against alone"
            held = ("heavy held to", "pairs", "light: before", "after", "heavy: before", "after", "alone", "total")
            written.print_table(title, held, [_guarding_cells(line) for line in guarded])
        written.say(f"{len(rows)} rows in {self._options.json}, {self._elapsed_s:.0f} s")

    def _by_name(
        self, names: Iterable[str], environment: dict[str, str], stack: contextlib.ExitStack, percent: int = 100
    ) -> dict[str, Worker]:
        started = self._start(((name, self._gpu) for name in names), environment, stack, percent)
        return {worker.name: worker for worker in started}

    def _affordable(self, alone: int) -> int:
        """Number of groups that fit into the time limit, with two more runs of each task alone and the percentages."""
        rest = 2 * alone + _guarded_count(self._options)
        left_s = self._options.limit_s - self._elapsed_s - START_S * len(self._options.percent)
        cost_s = self._span.warm_s + self._span.measure_s + TAIL_S + 0.05
        return max(0, int(left_s / cost_s) - rest)

    def _each(self, what: str, plan: Sequence[Sequence[Worker]]) -> None:
        for count, members in enumerate(plan, 1):
            if self._dead & set(members):
                continue
            try:
                self._one(members)
            except WorkerDied as death:
                self._drop_dead(members, death)
            if count % 10 == 0 or count == len(plan):
                written.say(f"{what}: {count} of {len(plan)} after {self._elapsed_s:.0f} s")

    def _one(self, members: Sequence[Worker]) -> None:
        at_s = self._elapsed_s
        answers, reading = self._machine.together(members, self._span)
        shown = {
            name: value for name, value in msgspec.structs.asdict(reading).items() if name in Row.__struct_fields__
        }
        row = Row(
            tasks=tuple(worker.name for worker in members),
            percent=tuple(worker.percent for worker in members),
            rates=tuple(float(answer["rate"]) for answer in answers),
            cpu=tuple(answer.get("cpu") for answer in answers),
            at_s=at_s,
            **shown,
        )
        self.rows.append(row)
        self.write()

    def _drop_dead(self, members: Sequence[Worker], death: WorkerDied) -> None:
        """The row of the group is lost; tasks whose workers still run are measured in other groups."""
        self._tell(f"left out from {self._elapsed_s:.0f} s on: {death}")
        self._dead |= {worker for worker in members if not worker.lives}

    def _percentages(self, workers: dict[str, Worker], environment: dict[str, str]) -> None:
        """Measures one percentage after the other, because workers for all of them at once would not fit."""
        if not self._options.percent:
            return
        light = [workers[name] for name in LIGHT if name in workers]
        heavy = [name for name in HEAVY if name in workers]
        self._each("beside heavy tasks", [[small, workers[name]] for name in heavy for small in light])
        for percent in self._options.percent:
            with contextlib.ExitStack() as stack:
                held = self._by_name(heavy, environment, stack, percent)
                plan = [[worker] for worker in held.values()]
                plan += [[small, worker] for worker in held.values() for small in light]
                self._each(f"heavy tasks held to {percent} %", plan)


def _groups(options: Options) -> list[Group]:
    """Groups in a mixed order, so that an interrupted run has some of every size."""
    names = [workload.name for workload in WORKLOADS]
    groups = draw(names, {2: options.pairs, 3: options.triples, 4: options.quadruples}, options.seed)
    random.Random(options.seed).shuffle(groups)
    return groups


def _who(groups: Sequence[Group], options: Options) -> list[str]:
    """Workers are started for those that take part only."""
    wanted = {name for group in groups for name in group} | set((*LIGHT, *HEAVY) if options.percent else ())
    return [workload.name for workload in WORKLOADS if workload.name in wanted]


def _guarded_count(options: Options) -> int:
    pairs = len(LIGHT) * len(HEAVY)
    return pairs + len(options.percent) * (pairs + len(HEAVY)) if options.percent else 0


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _sharing_cells(line: Sharing) -> list[str]:
    progress = (line.progress_least, line.progress_median, line.progress_most)
    slowed = (line.worst_slowdown_median, line.worst_slowdown_most)
    return [str(line.size), str(line.groups), *map(_times, progress), *map(_times, slowed)]


def _guarding_cells(line: Guarding) -> list[str]:
    speeds = (line.light_before, line.light_after, line.heavy_before, line.heavy_after, line.heavy_alone)
    total = f"{_times(line.total_before)} > {_times(line.total_after)}"
    return [f"{line.percent} %", str(line.pairs), *(written.shown(value) for value in speeds), total]
