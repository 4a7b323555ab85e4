"""Puts the daemon together: the only place that builds real objects. `carma up` calls `run`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from carma import __version__
from carma.config import Loaded, load_settings
from carma.core.model.settings import sampled_every
from carma.core.model.units import show_count
from carma.daemon.startup import home_directory as home
from carma.errors import BadSettings, CarmaError
from carma.paths import Paths, find_paths

if TYPE_CHECKING:
    from carma.core.model.settings import Sharing
    from carma.core.model.values import Gpu
    from carma.core.ports import Archive
    from carma.daemon.estimating.estimates import CallOff
    from carma.daemon.estimating.fingerprints import Fingerprint
    from carma.daemon.loop import Loop
    from carma.daemon.probes.pool import Probes
    from carma.daemon.recovery_on_start import Replayed
    from carma.daemon.shell import Shell
    from carma.daemon.startup.gpu_source import World
    from carma.launch.attempt_cgroups import AttemptCgroups, CgroupLimits
    from carma.launch.process import ProcessLauncher
    from carma.store.sqlite import SqliteStore
    from carma.trial.protocol import Context, Trials

log = logging.getLogger("carma.daemon")
Ready = Callable[[], None]

TRACE = "trace"  # the source that rests on trial runs
TEND_S = 5.0  # between looks at MPS servers that are idle or on their way out
CLOSE_LIMIT_S = 30.0
SWITCH_S = (
    0.0005  # the event loop waits this long for the interpreter while another thread computes (Python's own: 5 ms)
)


def run(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    detach: bool = False,
    new_database: bool = False,
    when_ready: Ready = lambda: None,
) -> int:
    """The daemon with these settings (by dotted name), until it is told to stop; raises what keeps it from starting.

    `config` is read in place of the usual settings file. Detached: returns as soon as it serves, with 0. In the
    foreground `when_ready` is called once it serves; it must not wait for the daemon's answers. `new_database` sets the
    files of an existing database aside.
    """
    paths = find_paths(os.environ)
    if config is not None:
        paths = msgspec.structs.replace(paths, config_file=config)
    loaded = load_settings(paths, os.environ, flags)
    home.prepare(paths)
    if not detach:
        return _serve(paths, loaded, when_ready, new_database=new_database)
    from carma.daemon.startup.detach import in_background

    with home.explained(paths):
        in_background(lambda ready: _serve(paths, loaded, ready, new_database=new_database), paths.daemon_log)
    return 0


def _serve(paths: Paths, loaded: Loaded, ready: Ready, *, new_database: bool) -> int:
    home.start_logging(loaded.settings)
    sys.setswitchinterval(SWITCH_S)
    from carma.store.sqlite import SqliteStore

    if not new_database:
        home.refuse_lost_database(paths)
    store = SqliteStore(paths.database, new=new_database)  # holds the lock: from here on there is no other daemon
    try:
        with home.explained(paths), home.pid_file(paths.pid_file):
            return asyncio.run(_live(paths, loaded, store, ready))
    finally:
        store.close()


async def _live(paths: Paths, loaded: Loaded, store: SqliteStore, ready: Ready) -> int:
    """Build, restore, serve, stop."""
    from carma.daemon.api.application import make_app
    from carma.daemon.daemon_log import LoopErrors
    from carma.daemon.housekeeping import keep_tidy
    from carma.daemon.http.server import HttpServer, fitting_limits
    from carma.daemon.http.socket_address import Address, keep_reachable
    from carma.daemon.probes.pool import Probes
    from carma.daemon.recovery_on_start import reconcile

    probes = Probes()
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    shell, loop, replayed, launcher = _build(paths, loaded, store, probes)
    address = Address(paths.socket, _socket_mode())
    listener = address.bind()
    app = make_app(shell, check_files=probes.check_runnable)
    server = HttpServer(app, listener, fitting_limits(os.geteuid()), closing=shell.stopping)
    _on_signals(shell, loop)
    running = asyncio.create_task(loop.run(), name="loop")
    beside: list[asyncio.Task[None]] = []
    try:
        await _unless_over(running, reconcile(shell, loop, replayed))
        beside.append(asyncio.create_task(server.run(), name="http"))
        beside.append(asyncio.create_task(keep_tidy(shell, store, paths.log_dir), name="housekeeping"))
        beside.append(asyncio.create_task(keep_reachable(address, server), name="socket"))
        beside.append(asyncio.create_task(_tend(loop, launcher), name="MPS servers"))
        beside.append(asyncio.create_task(_watch_database(shell, store), name="database"))
        _announce(shell, ready)
        await _unless_over(running, shell.stopping.wait())
        if shell.cancel_at_stop:
            await _unless_over(running, loop.cancel_all())
    finally:
        _notify("STOPPING=1")
        server.stop()
        shell.release()
        for task in beside[1:]:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await _stop(running)
        # Before it has settled it is not known what runs under the MPS servers; and another daemon may use them now if
        # the database is gone.
        if loop.settled.is_set() and shell.failure is None:
            await _close(loop, launcher)
        await loop.close()
        await probes.close()
        await shell.close()
        listener.close()
        address.remove()
    left = len(shell.state.active)
    log.info("stopped%s", f"; {show_count(left, 'task')} {'goes' if left == 1 else 'go'} on" if left else "")
    if shell.failure is not None:
        raise shell.failure
    return 0


async def _watch_database(shell: Shell, store: SqliteStore) -> None:
    await home.watch_database(lambda: shell.read(store.in_place), shell.give_up, store.path)


def _build(
    paths: Paths, loaded: Loaded, store: SqliteStore, probes: Probes
) -> tuple[Shell, Loop, Replayed, ProcessLauncher]:
    from carma.daemon.clock import SteadyClock
    from carma.daemon.executor import Hands
    from carma.daemon.loop import Loop
    from carma.daemon.recovery_on_start import last_time, replay, skip_used_ids
    from carma.daemon.shell import Shell
    from carma.daemon.startup.gpu_source import check_listed, open_world
    from carma.estimate.combination import make_estimators
    from carma.launch.attempt_files import AttemptFiles
    from carma.launch.confinement import GpuConfiner
    from carma.launch.mps import MpsServers
    from carma.launch.process import ProcessLauncher
    from carma.plugins import load_policy

    settings = loaded.settings
    policy = load_policy(settings.placement.policy)
    world = open_world(settings, paths)
    check_listed(settings.placement.gpus, world.sampler.gpus())
    events = store.load()
    clock = SteadyClock(world.speed, not_before=last_time(events))
    rules = sampled_every(settings.rules, settings.monitor.period_s * world.speed)
    replayed = replay(events, rules, policy)
    skip_used_ids(store, store, replayed.state, paths.log_dir)
    as_submitter = _as_submitter(loaded)
    servers = MpsServers(paths.state_dir / "mps", open_to_users=as_submitter)
    groups = _attempt_cgroups(paths)
    launcher = ProcessLauncher(
        paths.log_dir,
        extra_environment=world.environment,
        run_as_submitter=as_submitter,
        confiner=world.confiner
        or GpuConfiner(rules.sharing, servers, _cgroup_limits(rules.sharing, world.sampler.gpus(), groups)),
        servers=servers,
        groups=None if isinstance(groups, str) else groups,
        start_timeout_s=settings.launch.start_timeout_s,
        max_output_mib=settings.launch.max_output_mib,
    )
    shell = Shell(
        state=replayed.state,
        sequence=replayed.sequence,
        store=store,
        archive=store,
        clock=clock,
        settings=settings,
        origins=loaded.origins,
        paths=paths,
    )
    context = make_context(paths, loaded, world, store)
    hands = Hands(
        shell,
        launcher,
        make_estimators(context),
        has_trace=AttemptFiles(paths.log_dir).exists,
        call_off=call_off(context.trials),
        fingerprint=make_fingerprint(world),
        find_frameworks=probes.find_frameworks if world.trials else None,
    )
    return shell, Loop(shell, hands, world.sampler, period_s=settings.monitor.period_s), replayed, launcher


def make_context(paths: Paths, loaded: Loaded, world: World, archive: Archive) -> Context:
    """What the estimators are made with. Without trial runs nobody is asked for one: it would only refuse."""
    from carma.trial.protocol import Context

    rules = loaded.settings.rules
    sources = tuple(name for name in rules.memory.sources if world.trials or name != TRACE)
    rules = replace(rules, memory=replace(rules.memory, sources=sources))
    return Context(archive, world.sampler.gpus(), rules, make_trials(paths, loaded, world))


def make_trials(paths: Paths, loaded: Loaded, world: World) -> Trials:
    """Where tasks are stand-ins, a trial run could tell nothing."""
    if not world.trials:
        from carma.trial.protocol import NoTrials

        return NoTrials()
    from carma.daemon.estimating.trials import DaemonTrials

    return DaemonTrials(paths.state_dir / "trials", loaded.settings.rules.memory)


def call_off(trials: Trials) -> CallOff:
    """How a trial run is ended for which nobody waits any more, where there are any."""
    from carma.daemon.estimating.trials import DaemonTrials

    return trials.cancel if isinstance(trials, DaemonTrials) else lambda _task: None


def make_fingerprint(world: World) -> Fingerprint | None:
    """Who looks at what a command would run; stand-ins for tasks run nothing of their own."""
    if not world.trials:
        return None
    from carma.trial.fingerprint import fingerprint

    return lambda request: fingerprint(request) or ""


def _attempt_cgroups(paths: Paths) -> AttemptCgroups | str:
    """Where each attempt gets a cgroup, or why not. No controller is enabled: with one, systemd could not start the
    daemon again while tasks run in cgroups below its unit (EBUSY, systemd pull request 41304)."""
    from carma import cgroups
    from carma.launch.attempt_cgroups import AttemptCgroups

    found = cgroups.find(enable=False)
    return found if isinstance(found, str) else AttemptCgroups(found, paths.log_dir)


def _cgroup_limits(sharing: Sharing, gpus: Sequence[Gpu], groups: AttemptCgroups | str) -> CgroupLimits | None:
    """Where driver, kernel and the administrator give them; the sampler has opened NVML already."""
    if not sharing.caps:
        return None
    from carma.launch.attempt_cgroups import CgroupLimits, NvmlLimiter
    from carma.monitor.nvml import load_nvml

    found = CgroupLimits.find(NvmlLimiter(load_nvml()), gpus, groups)
    if isinstance(found, str):
        log.debug("%s", found)
        return None
    return found


async def _tend(loop: Loop, launcher: ProcessLauncher) -> None:
    """MPS servers that nobody needs any more are stopped, also when nothing runs and nobody looks."""
    while True:
        await asyncio.sleep(TEND_S)
        try:
            await loop.hands.with_launcher(launcher.maintain)
        except OSError as error:
            log.error("looking after the MPS servers: %s", error)


async def _close(loop: Loop, launcher: ProcessLauncher) -> None:
    try:
        async with asyncio.timeout(CLOSE_LIMIT_S):
            await loop.hands.with_launcher(launcher.close)
    except (OSError, TimeoutError) as error:
        log.error("the MPS servers could not be stopped: %s", error)


def _as_submitter(loaded: Loaded) -> bool:
    """Whether tasks run under their submitter's account."""
    wanted = loaded.settings.launch.run_as_submitter
    root = os.geteuid() == 0
    if wanted == "yes" and not root:
        raise BadSettings(
            "launch.run_as_submitter is yes, but the daemon is not root",
            "run it as root (a system service), or set it to auto or no",
        )
    return root if wanted == "auto" else wanted == "yes"


def _socket_mode() -> int:
    """As root everybody may ask (and is known by the kernel's word); otherwise only our own user."""
    return 0o666 if os.geteuid() == 0 else 0o600


def _on_signals(shell: Shell, loop: Loop) -> None:
    events = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        events.add_signal_handler(number, shell.request_stop)
    loop.watch_children()


async def _unless_over(running: asyncio.Task[None], work: Coroutine[object, object, object]) -> None:
    """Wait for `work`; should the loop end first, there is nothing left that could finish it."""
    task = asyncio.create_task(work)
    await asyncio.wait({running, task}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        await _stop(task)
        raise _why(running)
    task.result()


async def _stop(task: asyncio.Task[None] | asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _why(running: asyncio.Task[None]) -> CarmaError:
    """The error that ended the loop, out of the group that asyncio wraps it in."""
    error: BaseException | None = None if running.cancelled() else running.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    hint = "running tasks go on; keep a copy of the database and report this with the daemon's log"
    return CarmaError(f"the daemon cannot go on: {error}", hint)


def _announce(shell: Shell, ready: Ready) -> None:
    from carma.daemon.auth import unknown_users

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
    """Tell systemd, where it asked to be told (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(message.encode(), address)
