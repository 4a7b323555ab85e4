"""Cross-validation: every learner on every split, two at a time, each in a process with one thread.

Two threads on small matrices wait for each other more than they compute; two processes do not. The answer of a job
depends only on its rows and the seed, so the order in which jobs end does not matter.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context
from typing import Literal

import numpy as np

from carma.errors import Refused
from gpumemnet.dataset.inside.forks import end_with, handled
from gpumemnet.training import PUBLISHED, PUBLISHED_WIDTHS_GB, WIDTHS_GB
from gpumemnet.training.samples import MEDIAN, Numbers, Samples, Wholes

Tell = Callable[[str], None]
PROCESSES = 2
LESS = "If the machine was short of memory: --families and --only do less at a time."


@dataclass(frozen=True)
class Job:
    data: str  # name of the samples: "mlp", "public-mlp" …
    learner: str
    protocol: Protocol
    split: Split
    seed: int


@dataclass(frozen=True)
class Answers:
    """Predictions for the rows that were left out: quantiles in MiB, or of a classifier the classes for each width."""

    job: Job
    quantiles_mib: Numbers | None = None
    points_mib: Mapping[str, Numbers] = field(default_factory=dict)  # by the name of the operating point
    bounds_mib: Mapping[float, Numbers] = field(default_factory=dict)
    classes: Mapping[int, Wholes] = field(default_factory=dict)
    took_s: float = 0.0


_held: dict[str, Samples] = {}


@contextmanager
def workers(samples: Mapping[str, Samples]) -> Iterator[ProcessPoolExecutor]:
    """Processes that hold the samples, which are sent once to each. They end with this process, however it ends."""
    before = set(active_children())
    with _tracker_without_warnings():
        pool = ProcessPoolExecutor(PROCESSES, get_context("spawn"), _receive, (os.getpid(), dict(samples)))
    try:
        # The processes ignore Ctrl-C, which reaches all; this one ends them.
        with handled(signal.SIGINT, signal.SIG_IGN):
            for _ in range(PROCESSES):
                pool.submit(int)  # starts a process
        yield pool
    except BaseException as error:
        for child in set(active_children()) - before:
            child.kill()  # its result is not needed
        if isinstance(error, BrokenProcessPool):
            raise Refused("a process that was learning was killed", LESS) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _tracker_without_warnings() -> Iterator[None]:
    """multiprocessing's resource tracker, if started meanwhile, cleans up after killed processes without a warning."""
    name, before = "PYTHONWARNINGS", os.environ.get("PYTHONWARNINGS")
    os.environ[name] = ",".join(filter(None, (before, "ignore:resource_tracker")))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def held(data: str) -> Samples:
    """The samples of that name, in a process of the pool."""
    return _held[data]


def compete(samples: Mapping[str, Samples], jobs: Sequence[Job], tell: Tell) -> Iterator[Answers]:
    """The most expensive first, so that no process waits at the end."""
    with workers(samples) as pool:
        waiting = [pool.submit(answer_held, job) for job in jobs]
        for done, future in enumerate(as_completed(waiting), 1):
            answers = future.result()
            job = answers.job
            tell(f"{done}/{len(jobs)}  {job.data}: {job.learner}, {job.split.name}, {answers.took_s:.0f} s")
            yield answers


def _receive(parent: int, samples: dict[str, Samples]) -> None:
    end_with(parent, signal.SIGKILL)
    make_deterministic()
    _held.update(samples)


def answer_held(job: Job) -> Answers:
    return answer(job, held(job.data))


def make_deterministic() -> None:
    """One thread and deterministic kernels: the same seed gives the same numbers."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def answer(job: Job, samples: Samples) -> Answers:
    """Learns from the split's rows only. Of the other rows it uses what is known before a run."""
    began = time.monotonic()
    judged = samples.take(job.split.judged)
    unlabelled = replace(judged, footprint_mib=np.full(len(judged), np.nan))
    make = _classified if job.learner == PUBLISHED else _measured
    return replace(make(job, samples.take(job.split.learned), unlabelled), took_s=time.monotonic() - began)


def _measured(job: Job, learned: Samples, judged: Samples) -> Answers:
    from gpumemnet.training.ensemble import at_level, learn
    from gpumemnet.training.learners import LEARNERS

    learner = LEARNERS[job.learner]
    members = learner.members if job.protocol == "folds" else learner.fewer
    made = learn(learner.fit, learned, members, job.seed, WIDTHS_GB[learned.family][0])
    quantiles = made.quantiles_mib(judged)
    return Answers(
        job=job,
        quantiles_mib=quantiles,
        points_mib={
            "median": quantiles[:, MEDIAN],
            "operating": at_level(quantiles, made.operating_point),
            "careful": at_level(quantiles, made.careful_point),
        },
        bounds_mib={level: at_level(quantiles, level) * factor for level, factor in made.factors.items()},
    )


def _classified(job: Job, learned: Samples, judged: Samples) -> Answers:
    from gpumemnet.training.published_recipe import learn_published

    widths = PUBLISHED_WIDTHS_GB[learned.family]
    return Answers(job=job, classes=learn_published(learned, judged, widths, job.seed))


Protocol = Literal["folds", "shapes"]
FOLDS = 3  # as published
FEWEST = 30  # minimum number of rows of a shape


@dataclass(frozen=True)
class Split:
    name: str  # "fold 1", or the shape that is left out
    learned: Wholes
    judged: Wholes


def by_chance(rows: int, seed: int, folds: int = FOLDS) -> list[Split]:
    fold = np.random.default_rng(seed).permutation(rows) % folds
    return [Split(f"fold {k + 1}", np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def by_shape(shapes: Sequence[str]) -> list[Split]:
    """Leaving out a whole shape shows the accuracy on networks of an unknown kind. Shapes with few rows are never left
    out: a share of a few rows means nothing."""
    named = np.array(shapes)
    splits = [Split(one, np.flatnonzero(named != one), np.flatnonzero(named == one)) for one in sorted(set(shapes))]
    return [split for split in splits if len(split.judged) >= FEWEST and len(split.learned) >= FEWEST]
