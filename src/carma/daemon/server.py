"""Builds the parts of the daemon, runs them, and stops them in the right order. The only place that builds real
objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from carma import __version__, cgroups
from carma.cgroups import Cgroups
from carma.config import LoadedSettings, Settings
from carma.core.model.settings import Sharing
from carma.core.model.units import show_count, show_s
from carma.core.model.values import Gpu
from carma.core.ports import Confiner, Sampler
from carma.core.telemetry.window import sampled_every
from carma.daemon.api.application import make_app
from carma.daemon.auth import unknown_users
from carma.daemon.daemon_log import ErrorLog
from carma.daemon.estimating import Estimates
from carma.daemon.executor import Executor
from carma.daemon.housekeeping import keep_tidy
from carma.daemon.http.http_server import HttpServer, fitting_limits
from carma.daemon.http.socket_address import Address, keep_reachable
from carma.daemon.loop import Loop
from carma.daemon.notices import Notices
from carma.daemon.probes.pool import Probes
from carma.daemon.recovery_on_start import ReplayedLog, last_time, reconcile, replay, skip_used_ids
from carma.daemon.runtime import SteadyClock
from carma.daemon.shell import Shell
from carma.daemon.startup import home_directory as home
from carma.errors import BadSettings, CarmaError
from carma.estimate.combination import make_estimators
from carma.launch.attempt_cgroups import AttemptCgroups, CgroupLimits, LimitFailed, NvmlLimiter
from carma.launch.confinement import GpuConfiner
from carma.launch.mps import MpsServers
from carma.launch.process import ProcessLauncher
from carma.launch.step_metering import StepFiles
from carma.paths import Paths
from carma.plugins import load_policy
from carma.store.sqlite import SqliteStore
from carma.trial.fingerprint import fingerprint
from carma.trial.protocol import Context, NoTrials
from carma.trial.trial_run import TrialRuns

if TYPE_CHECKING:
    from carma.daemon.metrics.endpoint import MetricsEndpoint

log = logging.getLogger("carma.daemon")

TRACE = "trace"  # the estimator that uses trial runs
TEND_S = 5.0  # between checks of MPS servers that are idle or ending
CLOSE_LIMIT_S = 30.0


class DaemonParts(NamedTuple):
    shell: Shell
    loop: Loop
    launcher: ProcessLauncher
    estimates: Estimates
    probes: Probes
    store: SqliteStore
    replayed: ReplayedLog
    metrics: MetricsEndpoint | None
    notices: Notices


async def serve(paths: Paths, loaded: LoadedSettings, store: SqliteStore, ready: Callable[[], None]) -> int:
    """Serves until the daemon is stopped. Raises the error that ended it."""
    asyncio.get_running_loop().set_exception_handler(ErrorLog())
    parts = _build(paths, loaded, store)
    address = Address(paths.socket, mode=0o666 if os.geteuid() == 0 else 0o600)  # root's daemon serves all users
    listener = address.bind()
    app = make_app(parts.shell, parts.estimates, check_files=parts.probes.check_runnable)
    server = HttpServer(app, listener, fitting_limits(os.geteuid()))
    _handle_signals(parts)
    running = asyncio.create_task(parts.loop.run(), name="loop")
    background: list[asyncio.Task[None]] = []
    try:
        await _while_running(running, reconcile(parts.shell, parts.loop, parts.replayed))
        background += _start_background(parts, server, address)
        _announce(parts.shell, ready)
        await _while_running(running, parts.shell.stopping.wait())
        await _while_running(running, parts.loop.end_own_pauses())
        if parts.shell.cancel_at_stop:
            await _while_running(running, parts.loop.cancel_all())
        await _while_running(running, parts.notices.drain())
    finally:
        _notify("STOPPING=1")
        server.stop()
        parts.shell.release()
        for task in background[1:]:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await _cancel(running)
        await _close(parts)
        listener.close()
        address.remove()
    return _exit_code(parts.shell)


def _exit_code(shell: Shell) -> int:
    """Raises the error that ended the daemon."""
    left = len(shell.state.active)
    log.info("stopped%s", f"; {show_count(left, 'task')} left running" if left else "")
    if shell.failure is not None:
        raise shell.failure
    return 0


def _handle_signals(parts: DaemonParts) -> None:
    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        events.add_signal_handler(number, parts.shell.request_stop)
    events.add_signal_handler(signal.SIGCHLD, parts.loop.executor.poll_now.set)  # a runner has ended


def _start_background(parts: DaemonParts, server: HttpServer, address: Address) -> list[asyncio.Task[None]]:
    """The HTTP server comes first: it ends by itself."""
    shell, store, metrics = parts.shell, parts.store, parts.metrics
    work: dict[str, Coroutine[object, object, None]] = {
        "http": server.run(),
        "housekeeping": keep_tidy(shell, store, shell.paths.log_dir),
        "socket": keep_reachable(address, server),
        "MPS servers": _maintain(parts),
        "database": home.watch_database(lambda: shell.read(store.in_place), shell.fail, store.path),
        **({"metrics": metrics.run()} if metrics is not None else {}),
    }
    return [asyncio.create_task(one, name=name) for name, one in work.items()]


async def _close(parts: DaemonParts) -> None:
    # Before the state is reconciled it is not known what runs under the MPS servers. If the database is gone, another
    # daemon may use them by now.
    if parts.shell.reconciled.is_set() and parts.store.in_place():
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await parts.loop.executor.call_launcher(parts.launcher.close)
        except (OSError, TimeoutError) as error:
            log.error("the MPS servers could not be stopped: %s", error)
    await parts.loop.close()
    await parts.notices.close()
    await parts.probes.close()
    await parts.loop.writer.close()


async def _maintain(parts: DaemonParts) -> None:
    """Stops MPS servers that are no longer needed, also when no task runs."""
    while True:
        await asyncio.sleep(TEND_S)
        try:
            await parts.loop.executor.call_launcher(parts.launcher.maintain)
        except OSError as error:
            log.error("the MPS servers could not be checked: %s", error)


# Building.


class GpuSource(NamedTuple):
    """The GPUs of this machine, or virtual ones. The rest of the daemon does not know which."""

    sampler: Sampler
    speed: float  # of the daemon's clock
    environment: dict[str, str]  # added to the environment of every task
    confiner: Confiner | None  # None: that of cards and MIG instances
    trials: bool  # whether trial runs are useful: the programs of simulated tasks have no tensors


def open_gpus(settings: Settings, paths: Paths) -> GpuSource:
    """Raises NoGpus, with a hint to virtual GPUs."""
    virtual, measured = settings.virtual, settings.monitor.sm_activity == "auto"
    if virtual.gpus == 0:
        from carma.monitor.nvml import open_nvml  # loads the driver's library

        return GpuSource(open_nvml(measured=measured), 1.0, {}, None, trials=True)
    from carma.vgpu import virtual_server
    from carma.vgpu.device import DIRECTORY_VARIABLE
    from carma.vgpu.sampler import VirtualSampler

    directory = str(paths.vgpu_dir / "devices")  # tasks of all users write there, but not in its parent
    device = virtual_server.ensure(directory, virtual.gpus, virtual.gpu_memory_mib, virtual.speed)
    environment = {DIRECTORY_VARIABLE: directory}
    confiner = virtual_server.VirtualConfiner(settings.rules.sharing)
    return GpuSource(VirtualSampler(device, measured=measured), virtual.speed, environment, confiner, trials=False)


def check_listed(names: Sequence[str], gpus: Sequence[Gpu]) -> None:
    """Raises BadSettings if `placement.gpus` names a GPU that does not exist: tasks would wait for it."""
    known = {name for gpu in gpus for name in (gpu.id, str(gpu.index))}
    wrong = [repr(name) for name in names if name not in known]
    if wrong:
        present = ", ".join(f"{gpu.index} ({gpu.id})" for gpu in gpus) or "none"
        raise BadSettings(
            f"placement.gpus names {', '.join(wrong)}, and this server has no such GPU",
            f"the GPUs of this server, by index and UUID: {present}",
        )


def _build(paths: Paths, loaded: LoadedSettings, store: SqliteStore) -> DaemonParts:
    settings = loaded.settings
    policy = load_policy(settings.placement.policy, settings.plugins)
    source = open_gpus(settings, paths)
    gpus = source.sampler.gpus()
    check_listed(settings.placement.gpus, gpus)
    events = store.load()
    clock = SteadyClock(source.speed, not_before=last_time(events))
    if source.speed == 1.0 and clock.ahead_s > 60.0:
        log.warning(
            "the last stored event is %s in the future: the machine's clock was set back, or this home was used with "
            "virtual GPUs at a higher speed; times are ahead until the clock has caught up, at half speed",
            show_s(clock.ahead_s),
        )
    replayed = replay(events, sampled_every(settings.rules, settings.monitor.period_s * source.speed), policy)
    skip_used_ids(store, store, replayed.state, paths.log_dir)
    shell = Shell(
        state=replayed.state, sequence=replayed.sequence, store=store, clock=clock, loaded=loaded, paths=paths
    )
    probes = Probes()
    launcher = _make_launcher(paths, loaded, source, gpus)
    estimates = _make_estimates(shell, source, gpus)
    notices = Notices(shell, settings.notify, probes.notify)
    find_frameworks = probes.find_frameworks if source.trials else None
    executor = Executor(shell, launcher, estimates, find_frameworks, notices.send)
    steps = StepFiles(paths.log_dir)
    loop = Loop(shell, executor, source.sampler, period_s=settings.monitor.period_s, steps=steps)
    return DaemonParts(shell, loop, launcher, estimates, probes, store, replayed, _open_metrics(shell), notices)


def _open_metrics(shell: Shell) -> MetricsEndpoint | None:
    """None if no endpoint is configured, or if its address is taken: tasks run without metrics too."""
    settings = shell.settings.metrics
    if not settings.listen:
        return None
    from carma.daemon.metrics.endpoint import MetricsEndpoint  # with prometheus_client

    try:
        return MetricsEndpoint(shell, settings)
    except OSError as error:
        log.error("there are no metrics, because %s cannot be used: %s", settings.listen, error.strerror)
        return None


def _make_launcher(paths: Paths, loaded: LoadedSettings, source: GpuSource, gpus: Sequence[Gpu]) -> ProcessLauncher:
    settings = loaded.settings
    as_submitter = _as_submitter(loaded)
    servers = MpsServers(paths.state_dir / "mps", open_to_users=as_submitter)
    groups = _attempt_cgroups(paths)
    sharing = settings.rules.sharing
    return ProcessLauncher(
        paths.log_dir,
        extra_environment=source.environment,
        run_as_submitter=as_submitter,
        confiner=source.confiner or GpuConfiner(sharing, servers, _cgroup_limits(sharing, gpus, groups)),
        servers=servers,
        groups=groups,
        start_timeout_s=settings.launch.start_timeout_s,
        max_output_mib=settings.launch.max_output_mib,
        count_steps=settings.launch.progress,
        tracker_tags=settings.launch.tracker_tags,
    )


def _make_estimates(shell: Shell, source: GpuSource, gpus: tuple[Gpu, ...]) -> Estimates:
    """Builds the estimators. If tasks are simulated, the one that needs trial runs is left out: a trial run tells
    nothing."""
    rules = shell.settings.rules
    memory, trials = rules.memory, None
    if source.trials:
        trials = TrialRuns(shell.paths.state_dir / "trials", memory.trial_limit_s, memory.trial_memory_mib)
    else:
        sources = tuple(name for name in rules.memory.sources if name != TRACE)
        rules = replace(rules, memory=replace(rules.memory, sources=sources))
    context = Context(shell.archive, gpus, rules, trials or NoTrials())
    return Estimates(
        make_estimators(context),
        rules.memory,
        lambda: tuple(shell.state.gpus.values()),
        cancel_trial=trials.cancel if trials else lambda _task: None,
        fingerprint=(lambda request: fingerprint(request) or "") if trials else None,
    )


def _as_submitter(loaded: LoadedSettings) -> bool:
    """Whether tasks run under their submitter's account."""
    wanted = loaded.settings.launch.run_as_submitter
    root = os.geteuid() == 0
    if wanted == "yes" and not root:
        raise BadSettings(
            "launch.run_as_submitter is yes, but the daemon is not root",
            "run it as root (a system service), or set it to auto or no",
        )
    return root if wanted == "auto" else wanted == "yes"


def _attempt_cgroups(paths: Paths) -> AttemptCgroups | None:
    """The cgroups of attempts; None if this daemon cannot create any. No controller is enabled: with one,
    systemd could not start the daemon again while tasks run in cgroups below its unit (EBUSY, systemd pull request
    41304)."""
    found = cgroups.find(enable=False)
    if isinstance(found, Cgroups):
        return AttemptCgroups(found, paths.log_dir)
    log.debug("attempts have no cgroups: %s", found)
    return None


def _cgroup_limits(sharing: Sharing, gpus: Sequence[Gpu], groups: AttemptCgroups | None) -> CgroupLimits | None:
    """The driver's memory limits, if driver, kernel and administrator provide them. The sampler has opened NVML
    already."""
    if not sharing.caps or groups is None:
        return None
    from carma.monitor.nvml import load_nvml

    try:
        return CgroupLimits.find(NvmlLimiter(load_nvml()), gpus, groups)
    except LimitFailed as reason:
        log.debug("no memory limits for cgroups: %s", reason)
        return None


# Running.


async def _while_running(running: asyncio.Task[None], work: Coroutine[object, object, object]) -> None:
    """Wait for `work`. If the loop ends first, raise its error: `work` could not finish any more."""
    task = asyncio.create_task(work)
    await asyncio.wait({running, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        await _cancel(task)
        raise _error_of(running)
    task.result()


async def _cancel(task: asyncio.Task[None] | asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _error_of(running: asyncio.Task[None]) -> CarmaError:
    """The error that ended the loop, out of the group in which asyncio wraps it."""
    error: BaseException | None = None if running.cancelled() else running.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    hint = "running tasks continue; keep a copy of the database and report this with the daemon's log"
    return CarmaError(f"the daemon cannot go on: {error}", hint)


def _announce(shell: Shell, ready: Callable[[], None]) -> None:
    for name in unknown_users(shell.settings.daemon.admins):
        log.warning("daemon.admins names %r, and there is no such user", name)
    log.info(
        "carma %s serves %s with policy %s on %s",
        __version__,
        show_count(len(shell.state.gpus), "GPU"),
        shell.state.policy.name,
        shell.paths.socket,
    )
    _notify("READY=1")
    ready()


def _notify(message: str) -> None:
    """Tell systemd, if it asked for it (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message.encode(), address)
