"""From the options of `carma estimate` to a request, its target GPUs and the estimators that answer it.

All mistakes in the options are reported before the command runs. The command runs as the caller, in the current
directory and environment.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from carma.cli.checks.doctor_facts import DoctorFacts
from carma.cli.error_output import note
from carma.config import load_settings
from carma.core.model.settings import Rules
from carma.core.model.values import Estimate, Gpu, GpuId, NoEstimate, Owner, TaskId, TaskSpec
from carma.core.ports import EstimateRequest, Estimator
from carma.errors import NotFound, Usage
from carma.estimate.combination import make_estimator
from carma.estimate.local import EstimatorAnswer, SharedTrial, Summarised, answers, make_trials
from carma.paths import find_paths
from carma.plugins import ESTIMATORS, extension, names
from carma.store.memory import MemoryStore
from carma.trial.cards import DEFAULT, Card, as_gpu, find_card, unknown_card
from carma.trial.layers.description import Described, ReadSummary, SummaryReader, TrainingOptions
from carma.trial.protocol import Context, NoTrials, Trials

EXAMPLE = "try: carma estimate -- python train.py"
BEST = "trace"
STDIN = "-"
NO_OUTPUTS = "shapes of the layers' outputs"  # in the refusals of estimators that use a model's layers
OF_BOUND = "the bound is made for runs like"  # in a warning of gpumemnet about its bound
READER = "gpumemnet"  # the default estimator for a summary
# Both need a submitted task: the user's figure, and the history of the server.
OF_SUBMISSIONS = ("declared", "history")


class Options(TrainingOptions, frozen=True, kw_only=True):
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


# Options that a trial run makes unnecessary, with their fields.
SUMMARY_ONLY = {"--batch": "batch", "--input": "sample"} | {
    f"--{name.replace('_', '-')}": name for name in TrainingOptions.__struct_fields__
}


class _Summary(Summarised):
    """Adds the remarks about the summary to the answers of the estimators that read it."""

    def __init__(self, read: ReadSummary, trials: Trials | None) -> None:
        super().__init__(read.described, trials)
        self._remarks, self._gaps = (*read.remarks, *read.gaps), read.gaps
        self._is_partial = read.is_partial
        self._was_read = False

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        self._was_read = True
        return super().describe(request)

    def remarked(self, answer: EstimatorAnswer) -> EstimatorAnswer:
        was_read, self._was_read = self._was_read, False
        if not was_read:
            return answer
        if not isinstance(answer.result, Estimate):
            # The gaps of the summary explain missing outputs, with a remedy.
            reason = () if self._gaps and NO_OUTPUTS in answer.result.reason else (answer.result.reason,)
            return replace(answer, result=replace(answer.result, reason="; ".join((*self._gaps, *reason))))
        result = replace(answer.result, warnings=(*answer.result.warnings, *self._remarks))
        if self._is_partial:  # a bound would not hold
            warnings = tuple(warning for warning in result.warnings if not warning.startswith(OF_BOUND))
            result = replace(result, upper_mib=result.footprint_mib, level=None, warnings=warnings)
        return replace(answer, result=result)


@dataclass(frozen=True)
class Question:
    request: EstimateRequest
    estimators: tuple[Estimator, ...]
    shared: SharedTrial
    compare: bool
    summary: _Summary | None = None

    def answers(self) -> list[EstimatorAnswer]:
        """The answers of all estimators to compare them, otherwise the answers up to the first estimate."""
        found: list[EstimatorAnswer] = []
        for answer in answers(self.estimators, self.request, self.shared):
            found.append(self.summary.remarked(answer) if self.summary else answer)
            if isinstance(answer.result, Estimate) and not self.compare:
                break
        return found


def question(options: Options) -> Question:
    _check(options)
    read = None if options.summary is None else _read(options.summary, options)
    rules = _rules(options)
    request = _request(options, target_gpus(options.gpu, options.count))
    if options.command:
        from carma.daemon.probes.command_check import check_runnable

        check_runnable(request.spec)
    shared = SharedTrial(make_trials(rules, os.environ, options.steps) if options.command else NoTrials())
    summary = None if read is None else _Summary(read, shared if options.command else None)
    context = Context(archive=MemoryStore(), gpus=request.gpus, rules=rules, trials=summary or shared)
    estimators = tuple(make_estimator(name, context) for name in _estimators(options, rules))
    return Question(request, estimators, shared, options.compare, summary)


def _check(options: Options) -> None:
    if options.compare and options.estimator is not None:
        raise Usage("--compare and --estimator exclude each other", EXAMPLE)
    if options.summary is None:
        _reject(options, SUMMARY_ONLY, "needs --summary: a trial run observes it")
        if not options.command:
            raise Usage("no command was given", EXAMPLE)
    elif not options.command:
        _reject(options, {"--steps": "steps", "--limit": "limit_s"}, "needs a command: a summary has no trial run")
    if options.command and not options.command[0].strip():
        raise Usage("the first word of the command is empty", EXAMPLE)
    needs_reader = options.summary is not None and not options.compare and options.estimator is None
    if needs_reader and READER not in names(ESTIMATORS):
        raise Usage(
            "a summary needs an estimator that reads it",
            "try: carma estimate --estimator horus --summary resnet50.txt --batch 32, or --compare",
        )


def _reject(options: Options, fields: Mapping[str, str], why: str) -> None:
    for flag, field in fields.items():
        if getattr(options, field) not in (None, False):
            raise Usage(f"{flag} {why}", EXAMPLE)


def _read(file: str, options: Options) -> ReadSummary:
    """The model in a summary, with its training options."""
    read_summary = cast(SummaryReader, extension("model-summary", "gpumemnet", "carma estimate --summary"))
    training = TrainingOptions(**{name: getattr(options, name) for name in TrainingOptions.__struct_fields__})
    try:
        source = sys.stdin.buffer.read() if file == STDIN else Path(file)
        return read_summary(source, training, batch=options.batch, sample=options.sample or ())
    except Usage as error:
        raise Usage(f"{'stdin' if file == STDIN else file}: {error}", error.hint) from None


def _rules(options: Options) -> Rules:
    """The settings, overridden by the options."""
    rules: Rules = load_settings(find_paths(os.environ), os.environ).settings
    given = {"trial_limit_s": options.limit_s, "level": options.level}
    memory = replace(rules.memory, **{name: value for name, value in given.items() if value is not None})
    return replace(rules, memory=memory)


def _estimators(options: Options, rules: Rules) -> tuple[str, ...]:
    """The named estimator, all estimators, or the configured sources that work before a submission."""
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
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    spec = TaskSpec(command=options.command, directory=os.getcwd(), environment=dict(os.environ), gpus=options.count)
    return EstimateRequest(task=TaskId(0), owner=Owner(uid, os.getgid(), user), spec=spec, gpus=gpus)


def target_gpus(wanted: str | None, count: int) -> tuple[Gpu, ...]:
    """`count` GPUs of a model, or like a GPU of this machine."""
    card = None if wanted is None else find_card(wanted)
    here = () if card is not None else DoctorFacts().found.gpus
    if wanted is None and not here:
        card = find_card(DEFAULT)
        assert isinstance(card, Card)
        note(f"NVML finds no GPU on this machine: the estimate is for an {card.name} (--gpu selects another)")
    if card is not None:
        return tuple(as_gpu(card, index) for index in range(count))
    chosen = next((gpu for gpu in here if wanted is None or _matches(gpu, wanted)), None)
    if chosen is None:
        raise _unknown(str(wanted), here)
    # GPUs of the same kind; they need not exist.
    more = (replace(chosen, id=GpuId(f"{chosen.id}-{index}"), index=chosen.index + index) for index in range(1, count))
    return (chosen, *more)


def _matches(gpu: Gpu, wanted: str) -> bool:
    """Whether a word names the GPU: its index, its UUID or the beginning of it (as in CUDA_VISIBLE_DEVICES), or its
    model."""
    is_uuid = wanted.startswith(("GPU-", "MIG-")) and len(wanted) > 4 and gpu.id.startswith(wanted)
    return is_uuid or wanted == str(gpu.index) or wanted.casefold() == gpu.name.casefold()


def _unknown(wanted: str, here: tuple[Gpu, ...]) -> NotFound:
    if not (wanted.isdigit() or wanted.startswith(("GPU-", "MIG-"))):
        return unknown_card(wanted)
    listed = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in here)
    hint = f"its GPUs: {listed}" if listed else "it has no GPU; --gpu also takes a model: --gpu h200"
    return NotFound(f"there is no GPU {wanted} on this machine", hint)
