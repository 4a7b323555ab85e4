"""The real launcher: one runner for each attempt, found again through the files in the attempt's directory.

All state that matters is in those files, so a new daemon knows of every attempt what the old one knew. State in memory
only saves work: `poll` is called several times a second and costs one system call for an attempt that simply runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal as signals
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

import carma
from carma import procfs
from carma.core.model.outcome import Failed, LaunchFailed, Lost, Outcome
from carma.core.model.settings import Sharing
from carma.core.model.values import AttemptKey
from carma.core.ports import AttemptReport, Confiner, LaunchOrder
from carma.errors import CarmaError
from carma.launch import attempt_records as records
from carma.launch.attempt_cgroups import AttemptCgroups
from carma.launch.attempt_control import AttemptControl
from carma.launch.attempt_files import AttemptFiles, Claim, Started
from carma.launch.command_process import CANNOT_START
from carma.launch.confinement import GpuConfiner, task_environment
from carma.launch.confinement_records import DEVICE_FILES, ConfinementRecords
from carma.launch.exit_outcome import ExitRecord, judge_exit
from carma.launch.mps import MpsServers
from carma.launch.process_tree import TOKEN_VARIABLE, ProcessTrees
from carma.launch.runner_start import order_record, spawn_runner
from carma.launch.step_metering import metered
from carma.launch.supervisor import NO_SPACE

log = logging.getLogger("carma.launch")

TAKEOVERS = 3  # how often an order is given again after a runner died before it started the command
START_TIMEOUT_S = 60.0
RUNNER_MARGIN_S = 30.0  # beyond the start-up timeout, which the runner itself enforces
MAX_OUTPUT_MIB = 256
# Isolated (-I -S), so that neither the user's PYTHONPATH nor anything in site-packages is loaded. The package's own
# folder goes last on the path, behind the standard library.
_RUNNER_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from carma.launch.supervisor import main; sys.exit(main())"
RUNNER = (sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUNNER_PROGRAM, str(Path(carma.__file__).parent.parent))
STOPPING = frozenset((signals.SIGTERM, signals.SIGINT, signals.SIGKILL, signals.SIGQUIT, signals.SIGHUP))


class ProcessLauncher:
    """`directory` is accessible to the daemon alone. `run_as_submitter` needs root; without it only tasks of the
    daemon's own user are started."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        extra_environment: Mapping[str, str] | None = None,
        run_as_submitter: bool,
        confiner: Confiner | None = None,
        servers: MpsServers | None = None,
        device_files: str = DEVICE_FILES,
        groups: AttemptCgroups | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        max_output_mib: int = MAX_OUTPUT_MIB,
        count_steps: bool = True,
        tracker_tags: bool = True,
    ) -> None:
        """`max_output_mib`: of each of CARMA's own log files; 0 for no limit."""
        self.files = AttemptFiles(directory, max_output_bytes=max_output_mib * 2**20)
        self._start_timeout_s, self._count_steps = start_timeout_s, count_steps
        self._tracker_tags = tracker_tags
        self._extra = dict(extra_environment or {})
        self._run_as_submitter = run_as_submitter
        self._groups, self._servers = groups, servers
        self._children: dict[int, AttemptKey] = {}  # runners that we started and have not reaped
        self._started: dict[AttemptKey, Started] = {}
        self._refused: dict[AttemptKey, Failed | LaunchFailed] = {}
        self._unreadable: set[AttemptKey] = set()  # logged since the last successful poll
        self._unreleased: set[AttemptKey] = set()  # records that could not be dropped
        self._trees = ProcessTrees(groups)
        self._control = AttemptControl(self.files, self._trees)
        self._confinements = ConfinementRecords(
            self.files, confiner or GpuConfiner(Sharing(), None), servers, self._trees, device_files
        )

    # Launching.

    def launch(self, order: LaunchOrder) -> None:
        try:
            self._launch(order)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in records.TRANSIENT:
                return  # no trace is left, so the order is given again
            self._refuse(order.key, Failed(CANNOT_START, f"cannot start a runner: {error}"))
        except CarmaError as error:
            self._refuse(order.key, Failed(CANNOT_START, f"{error}. {error.hint}"))

    def _launch(self, order: LaunchOrder) -> None:
        if not self._run_as_submitter and order.owner.uid != os.geteuid():
            message = f"this server runs tasks of its own user only, not of {order.owner.name} (uid {order.owner.uid})"
            self._refuse(order.key, Failed(CANNOT_START, message))
            return
        if self.files.exists(order.key, records.EXIT) or self.files.exists(order.key, records.STARTED):
            return
        if order.key in self._children.values() or self._claimed(order.key):
            return
        self._refused.pop(order.key, None)
        # Submitters may pass through to their own logs; the modes of all other files deny access.
        mode = 0o711 if self._run_as_submitter else 0o700
        os.makedirs(self.files.directory, mode=mode, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.files.path(order.key), mode)
        arranged = self._confinements.arrange(order)
        record = records.encode(self._order_record(order, arranged.environment))
        arguments = [*RUNNER, self.files.path(order.key)]
        self._children[spawn_runner(arguments, self.files.path(order.key, records.RUNNER_LOG), record)] = order.key

    def _refuse(self, key: AttemptKey, outcome: Failed | LaunchFailed) -> AttemptReport:
        self._confinements.forget(key)
        self._refused[key] = outcome
        return AttemptReport(key=key, outcome=outcome)

    def _claimed(self, key: AttemptKey) -> bool:
        """Whether a runner has it. The claim of a dead runner is set aside: without a recorded start nothing ran."""
        claim = self.files.claim(key)
        if claim is None:
            return False
        takeovers = self._takeovers(key)
        if self.files.alive(claim) or takeovers >= TAKEOVERS or self.files.exists(key, records.STARTED):
            return True
        os.rename(self.files.path(key, records.CLAIM), self.files.path(key, f"dead-claim-{takeovers + 1}"))
        return False

    def _takeovers(self, key: AttemptKey) -> int:
        return sum(self.files.exists(key, f"dead-claim-{number}") for number in range(1, TAKEOVERS + 1))

    def _order_record(self, order: LaunchOrder, variables: Mapping[str, str]) -> dict[str, object]:
        token = uuid.uuid4().hex
        steps = self.files.path(order.key, records.STEPS) if self._count_steps and order.spec.progress else None
        environment = task_environment(order, self._extra, tracker_tags=self._tracker_tags)
        return order_record(
            order,
            metered({**environment, **variables, TOKEN_VARIABLE: token}, steps),
            start_timeout_s=self._start_timeout_s,
            max_output_bytes=self.files.max_output_bytes,
            cgroup_procs=self._cgroup_procs(order.key),
            count_steps=steps is not None,
            token=token,
        )

    def _cgroup_procs(self, key: AttemptKey) -> list[str]:
        """The files through which the runner joins the attempt's cgroup; none if it cannot be created."""
        try:
            return self._groups.create(key).procs_files if self._groups is not None else []
        except OSError:
            return []

    # Polling.

    def poll(self, keys: Iterable[AttemptKey]) -> tuple[AttemptReport, ...]:
        ended = self._reap()
        if self._servers is not None:
            self._servers.refresh()
        return tuple(self._find_if_readable(key, ended) for key in keys)

    def _reap(self) -> dict[AttemptKey, int]:
        """Our own runners that ended since the last call, with their exit status."""
        ended = {}
        for pid, key in list(self._children.items()):
            try:
                waited, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # reaped elsewhere in this process
                waited, status = pid, 0
            if waited:
                ended[key] = os.waitstatus_to_exitcode(status)
                del self._children[pid]
        return ended

    def _find_if_readable(self, key: AttemptKey, ended: Mapping[AttemptKey, int]) -> AttemptReport:
        """An attempt whose files cannot be read counts as claimed, so that the ends of all others are recorded. Where
        the machine has no descriptors or no memory left, no attempt can be read: that error is raised."""
        try:
            found = self._find(key, ended)
        except OSError as error:
            if error.errno in records.NO_RESOURCES:
                raise
            if key not in self._unreadable:
                log.error("the files of attempt %s cannot be read; it is tried again: %s", key, error)
            self._unreadable.add(key)
            return AttemptReport(key=key, claimed=True)
        self._unreadable.discard(key)
        return found

    def _find(self, key: AttemptKey, ended: Mapping[AttemptKey, int]) -> AttemptReport:
        started = self._started.get(key)
        # A runner that has written its exit record may hang in its end, on a file system that does not answer.
        if started is not None and self._runner_lives(started) and not self.files.exists(key, records.EXIT):
            return self._found_running(key, started)
        if key in self._refused:
            return AttemptReport(key=key, outcome=self._refused[key])
        return self._find_by_files(key) or self._find_unclaimed(key, ended)

    def _runner_lives(self, started: Started) -> bool:
        return started.runner.pid in self._children or self.files.alive(started.runner)

    def _find_unclaimed(self, key: AttemptKey, ended: Mapping[AttemptKey, int]) -> AttemptReport:
        """No runner has claimed it: our runner has not yet, or has failed, or the order may be given again."""
        if (pid := self._own_runner(key)) is not None:
            return self._check_runner(key, pid)
        status = ended.get(key, NO_SPACE)
        if status == NO_SPACE or status < 0 or not self.files.exists(key):  # negative: ended by a signal
            return AttemptReport(key=key)
        output = self.files.read_tail(key, records.RUNNER_LOG, 400).strip().rpartition("\n")[2]
        return self._refuse(key, Failed(CANNOT_START, f"the runner could not start: {output or 'it printed nothing'}"))

    def _find_by_files(self, key: AttemptKey) -> AttemptReport | None:
        """None if no runner has claimed it. The order of the checks matters: a runner writes, then ends."""
        claim = self.files.claim(key)
        living = claim is not None and self.files.alive(claim)
        ending = self.files.ending(key)
        started = self.files.started(key)
        if ending is not None:
            return self._found_ended(key, started, ending)
        if claim is None:
            return None
        if started is None:
            return self._find_unstarted(key, claim, living)
        if living or (started.runner.boot_id == self.files.boot_id and procfs.alive(started.pid, started.start_ticks)):
            self._started[key] = started
            return self._found_running(key, started)
        if started.runner.boot_id != self.files.boot_id:
            return self._ended(key, started, Lost("the machine restarted"))
        self._trees.signal(key, started, signals.SIGKILL)  # the rest of the tree holds GPU memory without a booking
        return self._ended(key, started, Lost("its runner was killed, so its exit status is unknown"))

    def _find_unstarted(self, key: AttemptKey, claim: Claim, living: bool) -> AttemptReport:
        """Claimed and not started yet. The runner enforces the start-up timeout; one that hangs itself is killed."""
        if living:
            return self._check_runner(key, claim.pid)
        if self._takeovers(key) < TAKEOVERS:
            return AttemptReport(key=key)
        reason = f"its runner died {TAKEOVERS + 1} times before it could start the command"
        return self._ended(key, None, Lost(reason))

    def _check_runner(self, key: AttemptKey, pid: int) -> AttemptReport:
        """A living runner that has not started the command."""
        limit_s = self._start_timeout_s + RUNNER_MARGIN_S
        found = procfs.process(pid)
        if found is None or procfs.age_s(found) <= limit_s:
            return AttemptReport(key=key, claimed=True)
        procfs.send(pid, found.start_ticks, signals.SIGKILL)
        if self.files.started(key) is not None:
            return AttemptReport(key=key, claimed=True)  # it started at the last moment: the next poll finds it
        return self._refuse(key, LaunchFailed(f"its runner did not start it within {limit_s:g} s"))

    def _own_runner(self, key: AttemptKey) -> int | None:
        return next((pid for pid, other in self._children.items() if other == key), None)

    def _found_running(self, key: AttemptKey, started: Started) -> AttemptReport:
        return AttemptReport(
            key=key,
            pid=started.pid,
            started_at=started.started_at,
            confinement=self._confinements.confinement(key),
            trouble=self._confinements.trouble(key, started),
        )

    def _found_ended(self, key: AttemptKey, started: Started | None, ending: ExitRecord) -> AttemptReport:
        mps = self._confinements.mps_state(key, started, ending.ended_at)
        outcome = judge_exit(ending, self.files.last_words(key, ending), self.files.stop(key), mps)
        return self._ended(key, started, outcome, ending.ended_at)

    def _ended(
        self, key: AttemptKey, started: Started | None, outcome: Outcome, at: float | None = None
    ) -> AttemptReport:
        self._started.pop(key, None)
        found = AttemptReport(
            key=key,
            pid=started.pid if started is not None else None,
            started_at=started.started_at if started is not None else None,
            outcome=outcome,
            ended_at=at,
            confinement=self._confinements.confinement(key) if started is not None else None,
            checkpoint_asked_at=self._control.asked_at(key),
        )
        self._confinements.forget(key)
        return found

    # Signals and process trees.

    def signal(self, key: AttemptKey, signal: int) -> None:
        """Signals the command. Until it has started, a request to stop is left for the runner. The runner looks for the
        request after it has recorded the start, and this method looks for the start after it has left the request, so
        one of the two sees the other. A further SIGKILL ends a runner that does not answer, and continues a stopped
        one."""
        started = self._known(key)
        requested, before = self.files.exists(key, records.STOP), self.files.stop(key)
        if signal in STOPPING and self.files.exists(key):
            with contextlib.suppress(OSError):
                self._control.record_stop(key, before, signal)
                if started is None:
                    records.write(self.files.path(key, records.STOP), {"signal": int(signal)}, durable=False)
            started = started or self.files.started(key)
        if started is None:
            if signal == signals.SIGKILL and requested:
                self._end_runner(key)
            return
        if started.runner.boot_id != self.files.boot_id:
            return
        if signal == signals.SIGKILL and not (before is not None and before.killed):
            self._confinements.terminate_clients(key, started)
        self._trees.signal(key, started, signal)
        if signal in STOPPING:
            self._control.unpause(key, started)
        if signal == signals.SIGKILL:
            procfs.send(started.runner.pid, started.runner.start_ticks, signals.SIGCONT)

    def _end_runner(self, key: AttemptKey) -> None:
        """End a runner that has not started the command: without it the command never starts. The order is given again,
        and the next runner finds the request to stop."""
        claim = self.files.claim(key)
        if claim is not None and claim.boot_id == self.files.boot_id and not self.files.exists(key, records.EXIT):
            procfs.send(claim.pid, claim.start_ticks, signals.SIGKILL)
        elif claim is None and (pid := self._own_runner(key)) is not None:
            os.kill(pid, signals.SIGKILL)  # our own child, not reaped yet

    def request_checkpoint(self, key: AttemptKey, signal: int, asked_at: float) -> bool:
        started = self._of_this_boot(key)
        return started is not None and self._control.request_checkpoint(key, started, signal, asked_at)

    def pause(self, key: AttemptKey) -> bool:
        started = self._of_this_boot(key)
        return started is not None and self._control.pause(key, started)

    def unpause(self, key: AttemptKey) -> bool:
        started = self._of_this_boot(key)
        return started is None or self._control.unpause(key, started)

    def pids(self, keys: Iterable[AttemptKey]) -> dict[int, AttemptKey]:
        known = {key: self._of_this_boot(key) for key in keys}
        return self._trees.members({key: started for key, started in known.items() if started is not None})

    def _known(self, key: AttemptKey) -> Started | None:
        return self._started.get(key) or self.files.started(key)

    def _of_this_boot(self, key: AttemptKey) -> Started | None:
        """None if it has not started, or ran before the machine restarted."""
        started = self._known(key)
        return started if started is not None and started.runner.boot_id == self.files.boot_id else None

    def has_order(self, key: AttemptKey) -> bool:
        return self.files.exists(key)

    # MPS servers, cgroups and files.

    def sharing_pids(self) -> frozenset[int]:
        return self._servers.pids() if self._servers is not None else frozenset()

    def maintain(self) -> None:
        """Called every few seconds: drops records that could not be dropped, stops MPS servers and removes cgroups that
        are no longer needed."""
        for key in tuple(self._unreleased):
            self._drop_records(key)
        if self._servers is not None:
            self._servers.stop_idle(self._confinements.needed_servers())
        if self._groups is not None:
            in_use = self._confinements.attempts()
            for key in self._groups.existing():
                if key not in in_use:
                    self._groups.remove(key)  # stays while it contains a process

    def close(self) -> None:
        """Stop MPS servers that no attempt needs; the attempts go on."""
        if self._servers is not None:
            self._servers.close(self._confinements.needed_servers())

    def release(self, key: AttemptKey) -> None:
        """The outcome is in the database: drop the records that are no longer needed."""
        self._refused.pop(key, None)
        if self._groups is not None:
            self._groups.remove(key)
        self._drop_records(key)

    def _drop_records(self, key: AttemptKey) -> None:
        """Retried after an error: a full disk, or a lease of the submitter on the output."""
        self._unreleased.add(key)
        with contextlib.suppress(OSError):
            self.files.drop_records(key)
            self._unreleased.discard(key)
