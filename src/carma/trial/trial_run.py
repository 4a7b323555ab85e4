"""Trial runs: the command itself, in the sandbox, with an emulated GPU; once for each state of its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import carma.trial
from carma.core.model.values import NoEstimate, Owner, TaskId
from carma.core.ports import EstimateRequest
from carma.trial.fingerprint import LIMIT_S, Unanswered, fingerprint, folder_digest
from carma.trial.layers.description import Described
from carma.trial.protocol import Trial
from carma.trial.replay.library_memory import with_attention
from carma.trial.report import EVENTS, FORMAT, REPORT, TrialReport
from carma.trial.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxRun
from carma.trial.trial_cache import TrialCache
from carma.trial.trial_environment import gpu_description, trial_environment
from carma.trial.trial_reasons import SOURCE, STEPS_NOTE, NoTrial, explained, no_answer, no_trial

REPORT_BYTES, EVENTS_BYTES = 64 * 2**20, 512 * 2**20
_FINAL = r'"stop":\s*"steps"'  # other reports count only when the command has ended: a helper process may leave one
_INSIDE = Path(carma.trial.__file__).parent / "inside"


class TrialCancelled(Exception):
    """The trial was ended by `cancel` or `close`. This is no refusal: refusals are cached, and the same command may be
    submitted again at once."""


class TrialRuns:
    """May be called from several threads. Each call has a sandbox of its own, which `cancel` or `close` ends."""

    def __init__(
        self,
        cache_dir: Path,
        limit_s: float = SandboxLimits.seconds,
        memory_mib: int = SandboxLimits.memory_mib,
        steps: int = 3,
        *,
        inside: Path = _INSIDE,
        make_sandbox: Callable[[], Sandbox] = Sandbox,
    ) -> None:
        """`cache_dir`: for trials and compiled files."""
        self._limits = SandboxLimits(seconds=limit_s, memory_mib=memory_mib, scratch_mib=max(256, memory_mib // 4))
        self._steps = steps
        self._inside = inside
        self._make_sandbox = make_sandbox
        self._builds = cache_dir / "builds"
        self._cache = TrialCache(cache_dir / "trials")
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Lock] = {}
        self._sandboxes: dict[Sandbox, TaskId] = {}
        self._closed = False

    def run(self, request: EstimateRequest) -> Trial | NoEstimate:
        """Raises TrialCancelled."""
        with self._sandbox_for(request.task) as sandbox:
            try:
                mark = fingerprint(request)
            except Unanswered as path:
                return NoTrial(reason=no_answer(str(path), LIMIT_S))
            if mark is None:
                return self._run(request, sandbox)
            key = self._key(mark, request)
            with self._alone(key):
                known = self._cache.get(key)
                if known is None:
                    known = self._run(request, sandbox)
                    self._cache.put(key, known)
                return known

    def describe(self, request: EstimateRequest) -> Described | NoEstimate:
        ran = self.run(request)
        if isinstance(ran, NoEstimate):
            return ran
        if ran.report.described is None:
            return NoEstimate(source=SOURCE, reason=ran.report.reason or "no model was called in the trial run")
        return with_attention(ran.report.described, ran)

    def cancel(self, task: TaskId) -> None:
        """End the calls for this task, also those that have not reached their sandbox yet."""
        with self._lock:
            for sandbox, owner in self._sandboxes.items():
                if owner == task:
                    sandbox.close()

    def close(self) -> None:
        """End all calls; later ones are cancelled, too."""
        with self._lock:
            self._closed = True
            for sandbox in self._sandboxes:
                sandbox.close()

    @contextlib.contextmanager
    def _sandbox_for(self, task: TaskId) -> Iterator[Sandbox]:
        sandbox = self._make_sandbox()
        with self._lock:
            self._sandboxes[sandbox] = task
            if self._closed:
                sandbox.close()
        try:
            yield sandbox
        finally:
            with self._lock:
                del self._sandboxes[sandbox]

    def _key(self, mark: str, request: EstimateRequest) -> str:
        parts = (mark, gpu_description(request), str(self._steps), str(FORMAT), folder_digest(self._inside))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """A second request with the same key waits for the answer of the first."""
        with self._lock:
            own = self._under_way.setdefault(key, threading.Lock())
        try:
            with own:
                yield
        finally:
            with self._lock:
                self._under_way.pop(key, None)

    def _run(self, request: EstimateRequest, sandbox: Sandbox) -> Trial | NoEstimate:
        spec = request.spec
        if not spec.command or not spec.command[0]:
            return NoTrial(reason="there is no command to run")
        run = SandboxRun(
            command=spec.command,
            directory=spec.directory,
            environment=trial_environment(request, self._steps),
            owner=request.owner,
            inside=str(self._inside.resolve()),
            awaited=(REPORT, _FINAL),
            files={REPORT: REPORT_BYTES, EVENTS: EVENTS_BYTES},
            notes=(STEPS_NOTE,),
            umask=spec.umask,
            keep=self._keep_for(request.owner),
            limits=self._limits,
        )
        ended = sandbox.run(run)
        if ended.status.ended == "abandoned":
            raise TrialCancelled("the trial run was cancelled")
        return self._judge(ended, request)

    def _judge(self, ended: SandboxResult, request: EstimateRequest) -> Trial | NoEstimate:
        status = ended.status
        if status.ended in ("awaited", "exit") and REPORT in ended.files:
            if status.files.get(EVENTS) == -2:
                return NoTrial(reason=f"the trial run has more than {EVENTS_BYTES} bytes of events")
            try:
                report = msgspec.json.decode(ended.files[REPORT], type=TrialReport)
            except msgspec.MsgspecError as error:
                return NoTrial(reason=f"the trial run's report cannot be read: {error}")
            report = explained(report, status)
            return Trial(report=report, events=ended.files.get(EVENTS, b""), seconds=ended.seconds)
        return no_trial(status, request.spec.command, self._limits)

    def _keep_for(self, owner: Owner) -> str | None:
        """The owner's directory of compiled files: what one user compiled is never loaded for another."""
        folder = self._builds / str(owner.uid)
        with contextlib.suppress(OSError):  # without it, it is compiled each time
            if folder.is_dir() and _exceeds(folder, self._limits.keep_mib * 2**20):
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(folder, owner.uid, owner.gid)
            return str(folder.resolve())
        return None


def _exceeds(folder: Path, limit_bytes: int) -> bool:
    """Whether a directory exceeds its limit. Only regular files directly in it belong there."""
    entries = list(os.scandir(folder))
    size = sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    return size > limit_bytes or any(entry.is_dir(follow_symlinks=False) for entry in entries)
