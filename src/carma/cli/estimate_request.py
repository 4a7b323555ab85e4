"""From the flags of `carma estimate` to a request and to those who are asked.

All that the user got wrong is said before anything is run. The command runs as the caller, here, with the environment
of this moment.
"""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from carma.cli.estimate_target import target_gpus
from carma.config import load_settings
from carma.core.model.settings import Rules
from carma.core.model.values import Estimate, Gpu, NoEstimate, Owner, Record, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.errors import Usage
from carma.estimate.combination import make_estimator
from carma.estimate.local import Answer, SharedTrial, Summarised, answers, make_trials
from carma.paths import find_paths
from carma.plugins import ESTIMATORS, extension, names
from carma.store.memory import MemoryStore
from carma.trial.layers.description import Attention, Described, Precision, ReadSummary, SummaryReader, TrainingOptions
from carma.trial.protocol import Context, NoTrials, Trials

EXAMPLE = "try: carma estimate -- python train.py"
BEST = "trace"
STDIN = "-"
NO_OUTPUTS = "shapes of the layers' outputs"  # as those say it who count by a model's layers
OF_BOUND = "the bound is made for runs like"  # as gpumemnet says it; without a bound it says nothing
READER = "gpumemnet"  # of a summary, where nobody else is named
# The user's word and the server's memory: neither says anything of a command that nobody submitted.
OF_SUBMISSIONS = ("declared", "history")


class Options(Record, frozen=True, kw_only=True):
    command: tuple[str, ...] = ()
    estimator: str | None = None
    gpu: str | None = None
    count: int = 1
    steps: int | None = None
    limit_s: float | None = None
    level: float | None = None
    compare: bool = False
    summary: str | None = None
    batch: int | None = None
    sample: tuple[int, ...] | None = None
    optimizer: str | None = None
    precision: Precision | None = None
    checkpointing: bool = False
    channels_last: bool = False
    attention: Attention | None = None
    heads: int | None = None


class _Summary(Summarised):
    """Remembers whether it was read, so that what is to be said of it stands with those who read it."""

    def __init__(self, read: ReadSummary, trials: Trials | None) -> None:
        super().__init__(read.described, trials)
        self._remarks, self._gaps = (*read.remarks, *read.gaps), read.gaps
        self._is_partial = read.is_partial
        self._was_read = False

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        self._was_read = True
        return super().describe(request)

    def remarked(self, answer: Answer) -> Answer:
        was_read, self._was_read = self._was_read, False
        if not was_read:
            return answer
        if not isinstance(answer.said, Estimate):
            # What the summary leaves out is why its outputs are not known, and says what to do.
            reason = () if self._gaps and NO_OUTPUTS in answer.said.reason else (answer.said.reason,)
            return replace(answer, said=replace(answer.said, reason="; ".join((*self._gaps, *reason))))
        said = replace(answer.said, warnings=(*answer.said.warnings, *self._remarks))
        if self._is_partial:
            kept = tuple(warning for warning in said.warnings if not warning.startswith(OF_BOUND))
            said = replace(said, upper_mib=said.footprint_mib, level=None, warnings=kept)  # it would not hold
        return replace(answer, said=said)


@dataclass(frozen=True)
class Question:
    request: EstimateRequest
    estimators: tuple[Estimator, ...]
    shared: SharedTrial
    compare: bool
    summary: _Summary | None = None

    def answers(self) -> list[Answer]:
        """Of all of them, to compare; otherwise up to the first estimate."""
        found: list[Answer] = []
        for answer in answers(self.estimators, self.request, self.shared):
            found.append(self.summary.remarked(answer) if self.summary else answer)
            if isinstance(answer.said, Estimate) and not self.compare:
                break
        return found


def question(options: Options) -> Question:
    _check(options)
    read = None if options.summary is None else _read(options.summary, options)
    rules = _rules(options)
    request = _request(options, target_gpus(options.gpu, options.count))
    if options.command:
        _check_runnable(request)
    shared = SharedTrial(make_trials(rules, os.environ, options.steps) if options.command else NoTrials())
    summary = None if read is None else _Summary(read, shared if options.command else None)
    context = Context(archive=MemoryStore(), gpus=request.gpus, rules=rules, trials=summary or shared)
    estimators = tuple(make_estimator(name, context) for name in _asked(options, rules))
    return Question(request, estimators, shared, options.compare, summary)


def _check(options: Options) -> None:
    if options.compare and options.estimator is not None:
        raise Usage("--compare asks every estimator: --estimator has no meaning beside it", EXAMPLE)
    if options.summary is None:
        _check_no_summary(options)
    elif not options.command:
        _check_no_trial(options)
    if options.command and not options.command[0].strip():
        raise Usage("the first word of the command is empty", EXAMPLE)
    is_open = options.summary is not None and not options.compare and options.estimator is None
    if is_open and READER not in names(ESTIMATORS):
        raise Usage(
            "a summary cannot be run: say who is to read it",
            "try: carma estimate --estimator horus --summary resnet50.txt --batch 32, or --compare",
        )


def _check_no_trial(options: Options) -> None:
    for flag, value in {"--steps": options.steps, "--limit": options.limit_s}.items():
        if value is not None:
            raise Usage(f"{flag} belongs to a trial run: a summary is read, and not run", EXAMPLE)


def _check_no_summary(options: Options) -> None:
    """What a summary leaves open and a trial run sees."""
    only = {
        "--batch": options.batch,
        "--input": options.sample,
        "--optimizer": options.optimizer,
        "--precision": options.precision,
        "--checkpointing": options.checkpointing or None,
        "--channels-last": options.channels_last or None,
        "--attention": options.attention,
        "--heads": options.heads,
    }
    for flag, value in only.items():
        if value is not None:
            raise Usage(f"{flag} belongs to --summary: a trial run sees for itself", EXAMPLE)
    if not options.command:
        raise Usage("no command was given", EXAMPLE)


def _read(file: str, options: Options) -> ReadSummary:
    """The model of a summary's file, and how it is trained."""
    read_summary = cast(SummaryReader, extension("model-summary", "gpumemnet", "carma estimate --summary"))
    training = TrainingOptions(
        optimizer=options.optimizer,
        precision=options.precision,
        checkpointing=options.checkpointing,
        channels_last=options.channels_last,
        attention=options.attention,
        heads=options.heads,
    )
    try:
        source = sys.stdin.buffer.read() if file == STDIN else Path(file)
        return read_summary(source, training, batch=options.batch, sample=options.sample or ())
    except Usage as error:
        raise Usage(f"{'stdin' if file == STDIN else file}: {error}", error.hint) from None


def _rules(options: Options) -> Rules:
    """The settings', with what the flags say instead."""
    rules: Rules = load_settings(find_paths(os.environ), os.environ).settings
    said = {"trial_limit_s": options.limit_s, "level": options.level}
    memory = replace(rules.memory, **{name: value for name, value in said.items() if value is not None})
    return replace(rules, memory=memory)


def _asked(options: Options, rules: Rules) -> tuple[str, ...]:
    """Who: the one that is named, all of them, or the settings' sources that can tell something before a submission."""
    if options.estimator is not None:
        return (options.estimator,)
    if options.compare:
        known = [name for name in names(ESTIMATORS) if name not in OF_SUBMISSIONS]
        return tuple(sorted(known, key=lambda name: (name != BEST, name)))
    if options.summary is not None:
        return (READER,)
    return tuple(name for name in rules.memory.sources if name not in OF_SUBMISSIONS) or (BEST,)


def _request(options: Options, gpus: tuple[Gpu, ...]) -> EstimateRequest:
    uid = os.getuid()
    spec = TaskSpec(command=options.command, directory=os.getcwd(), environment=dict(os.environ), gpus=options.count)
    return EstimateRequest(task=TaskId(0), owner=Owner(uid, os.getgid(), _user(uid)), spec=spec, gpus=gpus)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _check_runnable(request: EstimateRequest) -> None:
    from carma.daemon.probes.command_check import check_runnable

    check_runnable(request.spec)
