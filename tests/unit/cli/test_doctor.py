"""What the doctor finds on machines of many kinds: what is missing, what it costs, how to get it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from carma import __version__, cgroups
from carma.cli import carma, up
from carma.cli.checks import limitations, run_all
from carma.cli.checks import sharing_checks as sharing
from carma.cli.checks.doctor_facts import DoctorFacts, Finding, Found
from carma.core.model.values import Capabilities, Gpu, GpuId
from carma.core.telemetry.window import METRICS
from carma.errors import NoGpus
from carma.monitor.card_modes import CardFacts, MachineFacts
from carma.wire.api_types import SettingView
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import SERVER, FakeDaemon, gpu_view

FINE = Capabilities(metrics=METRICS, energy=True, processes=True, source="gpm")
INFERRED = Capabilities(power=True, energy=True, processes=True, source="inferred")
COARSE = Capabilities(energy=True, processes=True, source="nvml")
HALF = Capabilities(metrics=("sm_active",), processes=True, source="processes")


def gpu(index: int, capabilities: Capabilities = FINE, kind: Any = "card") -> Gpu:
    return Gpu(
        id=GpuId(f"GPU-{index}"), index=index, name="H200", memory_mib=143_360, kind=kind, capabilities=capabilities
    )


class Machine(DoctorFacts):
    """A machine that the test lays out; no daemon, settings by name."""

    def __init__(
        self, *gpus: Gpu, cards: tuple[CardFacts, ...] | None = None, virtual: int = 0, **settings: Any
    ) -> None:
        self.server = None
        self.running_settings = {}
        self.virtual = virtual
        facts = tuple(
            CardFacts(index=one.index, compute_mode="default", persistence=True, gpm="offered") for one in gpus
        )
        self.machine = MachineFacts(driver="580", cards=facts if cards is None else cards) if gpus or cards else None
        self.found = Found(gpus) if gpus else Found(error=NoGpus("no driver", "try virtual ones"))
        self.named = {name.replace("__", "."): value for name, value in settings.items()}

    def setting(self, name: str, default: Any) -> Any:
        return self.named.get(name, default)


def findings(machine: DoctorFacts) -> dict[str, Finding]:
    return {finding.check: finding for finding in run_all(machine)}


@pytest.fixture
def mps_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both programs on PATH; neither is ever to be run."""
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\ntouch {tmp_path}/was-run\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    return tmp_path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces this machine's devices, mounts and daemon."""
    monkeypatch.setenv("CARMA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sharing, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(sharing, "DEVICES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()


@pytest.mark.usefixtures("mps_program")
def test_a_machine_with_everything_has_nothing_to_complain_about() -> None:
    found = findings(Machine(gpu(0), gpu(1)))
    about_gpus = ("driver", "gpus", "activity", "mps", "compute mode", "persistence", "memory limits", "permissions")
    assert {name: found[name].verdict for name in about_gpus} == dict.fromkeys(about_gpus, "ok")
    assert "MPS" in found["memory limits"].text


def test_a_machine_without_a_gpu_gives_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "find_program", lambda _environment: None)
    found = findings(Machine())
    assert found["gpus"] == Finding("gpus", "warn", "no driver", "try virtual ones")
    assert not found.keys() & {"driver", "activity", "mps", "mig", "compute mode", "persistence", "memory limits"}
    virtual = findings(Machine(virtual=2))
    assert virtual["gpus"].verdict == "ok"
    assert virtual["memory limits"].verdict == "ok"


def test_under_a_policy_that_predicts_the_gate_refuses_gpus_without_any_activity_only() -> None:
    for policy in ("goodput", "horus"):
        missing = findings(Machine(gpu(0, COARSE), placement__policy=policy))["activity"]
        assert missing.verdict == "warn"
        assert "one task at a time" in missing.limitation
        assert "gate.enabled = false" in missing.hint
        inferred = findings(Machine(gpu(0, INFERRED), placement__policy=policy))["activity"]
        assert "predicted less well" in inferred.limitation
        assert "gate" not in inferred.text + inferred.hint
        ungated = findings(Machine(gpu(0, COARSE), gate__enabled=False, placement__policy=policy))["activity"]
        assert "learns nothing of the tasks" in ungated.limitation


def test_missing_sm_activity_is_a_warning_with_remedies() -> None:
    cards = (CardFacts(index=0), CardFacts(index=1))
    found = findings(Machine(gpu(0, COARSE), gpu(1), cards=cards, placement__policy="magm"))["activity"]
    assert found.verdict == "warn"
    assert "GPU 0: coarse utilisation only; GPU 1: SM activity" in found.text
    assert found.text.count("GPU 0: ") == 2
    assert found.text.count("GPU 1: ") == 1
    assert "DCGM" in found.hint
    assert "gate.enabled = false" in found.hint
    ungated = findings(Machine(gpu(0, COARSE), gate__enabled=False, placement__policy="magm"))["activity"]
    assert (ungated.verdict, ungated.hint) == ("ok", "")
    assert "gate.enabled = false" in ungated.text
    assert findings(Machine(gpu(0, HALF)))["activity"].verdict == "warn"  # no DRAM activity: the gate refuses too


def test_inferred_activity_is_named_with_its_consequence_and_is_no_missing_activity() -> None:
    found = findings(Machine(gpu(0, INFERRED), gpu(1)))["activity"]
    assert found.verdict == "warn"
    assert "inferred from power" in found.limitation
    assert "one task at a time" not in found.text + found.limitation
    both = findings(Machine(gpu(0, INFERRED), gpu(1, COARSE), placement__policy="magm"))["activity"]
    assert "SM activity of GPU 0 is inferred" in both.limitation
    assert "GPU 1: each takes one task at a time" in both.limitation
    chosen = findings(Machine(gpu(0, INFERRED), monitor__sm_activity="inferred"))["activity"]
    assert "monitor.sm_activity" in chosen.hint
    ungated = Machine(gpu(0, INFERRED), gate__enabled=False, placement__policy="magm")
    assert findings(ungated)["activity"].verdict == "ok"


def test_virtual_gpus_without_counters_are_named_with_the_setting_that_hides_them() -> None:
    assert "activity" not in findings(Machine(virtual=2))
    found = findings(Machine(virtual=2, monitor__sm_activity="inferred"))["activity"]
    assert found.verdict == "warn"
    assert "inferred from power" in found.text
    assert "monitor.sm_activity" in found.hint


def test_a_counter_behind_a_permission_names_the_drivers_option() -> None:
    cards = (CardFacts(index=0, gpm="forbidden"),)
    found = findings(Machine(gpu(0, COARSE), cards=cards))["activity"]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in found.hint


def test_a_lost_card_is_bad() -> None:
    cards = (CardFacts(index=0, fault="it does not answer: GPU is lost"), CardFacts(index=1))
    found = findings(Machine(gpu(1), cards=cards))["driver"]
    assert found.verdict == "bad"
    assert "GPU 0: it does not answer" in found.text


@pytest.mark.parametrize(
    ("mechanism", "verdict"), [("auto", "warn"), ("mps", "bad"), ("timeslice", "ok"), ("mig", "ok")]
)
def test_missing_mps_is_a_problem_only_for_mechanisms_that_use_it(
    monkeypatch: pytest.MonkeyPatch, mechanism: str, verdict: str
) -> None:
    monkeypatch.setattr(sharing, "find_program", lambda _environment: None)
    found = findings(Machine(gpu(0), sharing__mechanism=mechanism))
    assert found["mps"].verdict == verdict
    assert "MPS" not in found["memory limits"].text


def test_mps_is_looked_for_and_never_started(mps_program: Path) -> None:
    found = findings(Machine(gpu(0)))["mps"]
    assert found.verdict == "ok"
    assert str(mps_program / "nvidia-cuda-mps-control") in found.text
    assert not (mps_program / "was-run").exists()


@contextlib.contextmanager
def running_as(name: str, directory: Path) -> Iterator[int]:
    """A process that goes by that name, and is ended."""
    program = directory / name
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    process = subprocess.Popen([str(program), "600"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_an_mps_daemon_of_another_program_is_a_warning(mps_program: Path, tmp_path: Path) -> None:
    pipes = mps_program / "pipes"
    pipes.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    with running_as("nvidia-cuda-mps-control", other) as pid:
        (pipes / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")
        found = findings(Machine(gpu(0)))["mps"]
        assert found.verdict == "warn"
        assert f"pid {pid}" in found.text
    assert findings(Machine(gpu(0)))["mps"].verdict == "ok"  # it ended, and left its file
    (pipes / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()))
    assert findings(Machine(gpu(0)))["mps"].verdict == "ok"  # a pid that came back for another process


@pytest.mark.parametrize(
    ("mode", "verdict", "name"),
    [
        ("default", "ok", "DEFAULT"),
        ("prohibited", "bad", "PROHIBITED"),
        ("exclusive_process", "warn", "EXCLUSIVE_PROCESS"),
    ],
)
def test_a_compute_mode_is_reported_with_a_remedy(mode: Any, verdict: str, name: str) -> None:
    found = findings(Machine(gpu(0), cards=(CardFacts(index=0, compute_mode=mode),)))["compute mode"]
    assert found.verdict == verdict
    assert name in found.text
    assert ("nvidia-smi -i 0 -c DEFAULT" in found.hint) == (mode != "default")


@pytest.mark.parametrize(
    ("card", "mechanism", "verdict", "said"),
    [
        (CardFacts(index=0, mig=False, mig_pending=False), "auto", "ok", "off"),
        (CardFacts(index=0, mig=True, mig_pending=True, instances=3), "auto", "ok", "GPU 0: on, 3 instances"),
        (CardFacts(index=0, mig=True, mig_pending=True), "auto", "warn", "GPU 0 takes no task"),
        (CardFacts(index=0, mig=False, mig_pending=True), "auto", "ok", "on after the next reset"),
        (
            CardFacts(index=0, mig=False, mig_pending=False),
            "mig",
            "bad",
            "MIG is off: sharing.mechanism = 'mig'",
        ),
        (CardFacts(index=0, mig=True, mig_pending=True), "mig", "bad", "GPU 0: on, 0 instances: sharing.mechanism"),
        (CardFacts(index=0), "mig", "bad", "sharing.mechanism"),
    ],
)
def test_mig_modes_are_reported_with_a_remedy(card: CardFacts, mechanism: str, verdict: str, said: str) -> None:
    found = findings(Machine(gpu(0), cards=(card,), sharing__mechanism=mechanism))["mig"]
    assert found.verdict == verdict
    assert said in found.text
    assert bool(found.hint) == (verdict != "ok")


@pytest.mark.parametrize("virtual", [0, 2])
def test_the_mechanism_mig_without_cards_leaves_no_gpu_for_tasks(virtual: int) -> None:
    found = findings(Machine(virtual=virtual, sharing__mechanism="mig"))["mig"]
    assert found.verdict == "bad"
    assert found.text.endswith("no GPU takes a task")
    assert ("virtual" in found.text) == bool(virtual)


def test_mig_instances_beside_a_daemon_with_virtual_gpus_are_not_its_own() -> None:
    cards = (CardFacts(index=0, mig=True, mig_pending=True, instances=3),)
    assert findings(Machine(gpu(0), cards=cards, sharing__mechanism="mig"))["mig"].verdict == "ok"
    assert findings(Machine(gpu(0), cards=cards, virtual=2, sharing__mechanism="mig"))["mig"].verdict == "bad"


def test_cards_that_know_no_mig_are_not_spoken_of() -> None:
    assert "mig" not in findings(Machine(gpu(0), cards=(CardFacts(index=0),)))


def test_the_problem_of_dcgm_is_in_the_hint() -> None:
    machine = Machine(gpu(0, COARSE))
    machine.found = Found(machine.found.gpus, dcgm_problem="no host engine answers")
    assert "(here: no host engine answers)" in findings(machine)["activity"].hint


@pytest.mark.parametrize(("driver", "named"), [("580.159", ["580", "615"]), ("615.10", []), ("", [])])
def test_the_driver_version_decides_about_cgroup_limits(driver: str, named: list[str]) -> None:
    machine = Machine(gpu(0))
    machine.machine = MachineFacts(driver=driver)
    text = findings(machine)["cgroup"].text
    assert sorted(re.findall(r"\b\d{3}\b", text)) == named
    assert ("cgroup limits" in text) == bool(driver)


@pytest.mark.parametrize(("kills", "verdict"), [(3, "ok"), (None, "warn")])
def test_uncounted_out_of_memory_kills_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, kills: int | None, verdict: str
) -> None:
    monkeypatch.setattr("carma.cgroups.oom_kills", lambda: kills)
    assert findings(Machine(gpu(0)))["cgroup"].verdict == verdict


def test_persistence_mode_is_never_a_warning() -> None:
    cards = (CardFacts(index=0, persistence=False), CardFacts(index=1, persistence=True))
    found = findings(Machine(gpu(0), gpu(1), cards=cards))["persistence"]
    assert found.verdict == "ok"
    assert found.text.startswith("off on GPU 0:")


@pytest.mark.usefixtures("mps_program")
@pytest.mark.parametrize(
    ("settings", "verdict", "limits"),
    [
        ({"sharing__caps": False}, "warn", {"watchdog"}),
        ({"sharing__caps": False, "sharing__watchdog": False}, "bad", set()),
        ({"sharing__watchdog": False}, "warn", {"MPS", "PyTorch"}),
        ({"sharing__mechanism": "timeslice"}, "ok", {"PyTorch", "watchdog"}),
    ],
)
def test_the_limits_of_bookings_are_named(settings: dict[str, Any], verdict: str, limits: set[str]) -> None:
    found = findings(Machine(gpu(0), **settings))["memory limits"]
    text = found.text.replace("no watchdog", "")
    assert (found.verdict, {name for name in ("MPS", "PyTorch", "watchdog") if name in text}) == (verdict, limits)


@pytest.mark.parametrize(
    ("settings", "verdict", "limit"),
    [
        ({}, "ok", "virtual GPU"),
        ({"sharing__caps": False}, "warn", "watchdog"),
        ({"sharing__caps": False, "sharing__watchdog": False}, "bad", "nothing"),
    ],
)
def test_the_limits_of_bookings_on_virtual_gpus_are_named(settings: dict[str, Any], verdict: str, limit: str) -> None:
    found = findings(Machine(virtual=2, **settings))["memory limits"]
    assert (found.verdict, limit in found.text) == (verdict, True)


@pytest.mark.usefixtures("mps_program")
def test_mig_instances_are_not_held_by_mps() -> None:
    assert "MPS" not in findings(Machine(gpu(0, kind="mig")))["memory limits"].text


def test_device_files_that_cannot_be_opened_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (sharing.DEVICES / name).touch()
    assert findings(Machine(gpu(0)))["permissions"].verdict == "ok"
    usual = os.access
    monkeypatch.setattr("os.access", lambda path, mode: str(path)[-1] != "0" and usual(path, mode))
    found = findings(Machine(gpu(0)))["permissions"]
    assert found.verdict == "bad"
    assert f"{sharing.DEVICES}/nvidia0" in found.text
    assert "nvidiactl" not in found.text


@pytest.mark.parametrize(
    ("options", "uid", "verdict"),
    [
        ("rw,hidepid=2", 1000, "warn"),
        ("rw,hidepid=invisible", 1000, "warn"),
        ("rw", 1000, "ok"),
        ("rw,hidepid=2", 0, "ok"),
    ],
)
def test_a_proc_that_hides_processes_is_a_warning_except_for_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, uid: int, verdict: str
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"tmpfs /tmp tmpfs rw 0 0\nproc /proc proc {options} 0 0\n")
    monkeypatch.setattr(sharing, "MOUNTS", mounts)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert findings(Machine(gpu(0)))["permissions"].verdict == verdict


def test_running_everybodys_tasks_as_root_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert findings(Machine(gpu(0), launch__run_as_submitter="no"))["permissions"].verdict == "bad"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert findings(Machine(gpu(0), launch__run_as_submitter="no"))["permissions"].verdict == "ok"


@pytest.mark.parametrize(
    ("uid", "owner"),
    [(0, "root"), (1001, "ada"), (1000, "this user")],
)
def test_the_owner_of_the_daemon_is_named_with_the_permissions(
    monkeypatch: pytest.MonkeyPatch, uid: int, owner: str
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    machine = Machine(gpu(0))
    machine.server = msgspec.structs.replace(SERVER, uid=uid)
    assert owner in findings(machine)["permissions"].text


def test_differing_settings_of_the_running_daemon_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: SERVER.uid)
    with FakeDaemon() as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        alike = [SettingView(name="memory.sources", value=["declared", "history", "trace"], origin="default")]
        daemon.answers["settings"] = alike
        assert "differs" not in findings(DoctorFacts())["settings"].text
        daemon.answers["settings"] = [
            *alike,
            SettingView(name="sharing.caps", value=False, origin="flag --set sharing.caps"),
        ]
        found = findings(DoctorFacts())["settings"]
        assert found.text.endswith("the running daemon differs: sharing.caps = false (flag --set sharing.caps)")
        assert "carma config show" in found.hint


def test_a_daemon_of_another_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDaemon() as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        assert findings(DoctorFacts())["daemon"].verdict == "ok"
        daemon.answers["server"] = msgspec.structs.replace(SERVER, version="0.1.0")
        found = findings(DoctorFacts())["daemon"]
        assert found.verdict == "warn"
        assert found.text.startswith("version 0.1.0,")
        assert found.hint.startswith(f"this command is {__version__}; ")
        assert found.hint.endswith("carma down, then carma up")


def test_the_settings_of_a_running_daemon_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDaemon() as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        (daemon.home / "config.toml").write_text("[gate]\nenabled = false\n")
        assert DoctorFacts().setting("gate.enabled", True) is False  # its own file, where the daemon does not say
        daemon.answers["settings"] = [SettingView(name="gate.enabled", value=True, origin="flag")]
        assert DoctorFacts().setting("gate.enabled", False) is True
        daemon.answers["gpus"] = [gpu_view(0, kind="virtual")]
        assert DoctorFacts().virtual == 1


def test_a_check_that_breaks_is_a_finding() -> None:
    class Broken(Machine):
        @property
        def found(self) -> Found:
            raise RuntimeError("torn")

        @found.setter
        def found(self, _value: Found) -> None: ...

    found = findings(Broken(gpu(0)))
    assert (found["gpus"].verdict, found["gpus"].text) == ("bad", "RuntimeError: torn")


# What `carma up` prints.


def without_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "find_program", lambda _environment: None)
    monkeypatch.setattr("carma.cgroups.find", lambda **_: "The cgroup of this process was not delegated to it.")
    monkeypatch.setattr("carma.trial.kernel_limits.systemd_scope", lambda _environ: "systemd does not run here.")


def test_each_limitation_of_a_server_is_one_line_with_its_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    without_everything(monkeypatch)
    found = limitations(Machine(gpu(0, COARSE), gpu(1)))
    assert_wording("limitations", {str(number): line for number, line in enumerate(found)})


def test_the_doctor_explains_each_limitation(monkeypatch: pytest.MonkeyPatch) -> None:
    without_everything(monkeypatch)
    machine = Machine(gpu(0, COARSE), gpu(1))
    explained = [finding for finding in run_all(machine) if finding.limitation]
    assert [finding.limitation for finding in explained] == limitations(machine)
    assert all(finding.verdict != "ok" and finding.hint for finding in explained)


@pytest.mark.usefixtures("mps_program")
def test_a_server_without_limitations_has_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = cgroups.Cgroups(2, {"": "/sys/fs/cgroup"}, frozenset({"pids", "memory"}))
    monkeypatch.setattr("carma.cgroups.find", lambda **_: groups)
    assert limitations(Machine(gpu(0), gpu(1))) == []


def test_carma_up_says_that_activity_is_inferred(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_everything(monkeypatch)
    with FakeDaemon() as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        daemon.answers["gpus"] = [gpu_view(0, metrics="inferred")]
        up._greet(detached=True)
    assert "  limit   SM activity of GPU 0 is inferred" in capsys.readouterr().out


@pytest.mark.parametrize(("source", "complete"), [("gpm", True), ("dcgm", True), ("processes", False), ("nvml", False)])
def test_carma_up_prints_the_limitations_that_the_daemon_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, complete: bool
) -> None:
    without_everything(monkeypatch)
    with FakeDaemon() as daemon:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        daemon.answers["gpus"] = [gpu_view(0, metrics="gpm"), gpu_view(1, metrics=source)]
        up._greet(detached=True)
    limits = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("  limit ")]
    assert (["no", "complete"] in [words[:2] for words in limits]) is not complete
    assert len(limits) == (3 if complete else 4)


def test_carma_up_names_a_daemon_for_all_users_that_manages_the_same_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_everything(monkeypatch)
    with FakeDaemon() as daemon, FakeDaemon() as server:
        monkeypatch.setenv("CARMA_HOME", str(daemon.home))
        monkeypatch.setattr(up, "SYSTEM_SOCKET", server.home / "carma.sock")
        for kind, is_named in (("card", True), ("virtual", False)):
            daemon.answers["gpus"] = [gpu_view(0, kind=kind)]
            up._greet(detached=True)
            assert (str(server.home) in capsys.readouterr().err) is is_named


def test_a_home_that_the_daemon_refuses_is_bad(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    found = findings(Machine(gpu(0)))["directory"]
    assert (found.verdict, bool(found.hint)) == ("bad", True)
    assert f"{tmp_path}/home can be written by all users" in found.text


def test_unknown_administrators_are_a_warning_that_the_start_prints() -> None:
    machine = Machine(gpu(0), daemon__admins=["root", "no-such-user"])
    found = findings(machine)["admins"]
    assert found.verdict == "warn"
    assert "'no-such-user'" in found.text
    assert "'root'" not in found.text
    assert found.limitation in limitations(machine)
    assert "admins" not in findings(Machine(gpu(0), daemon__admins=["root"]))


@pytest.mark.skipif(os.geteuid() != 0, reason="root's daemon serves other users")
def test_a_python_that_only_root_can_run_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # unlike pytest's, it can be opened for all users
        program = Path(made, "bin", "python")
        program.parent.mkdir()
        program.symlink_to("/bin/sh")
        monkeypatch.setattr("sys.executable", str(program))
        os.chmod(made, 0o755)
        assert findings(Machine(gpu(0)))["python"].verdict == "ok"
        os.chmod(made, 0o700)
        found = findings(Machine(gpu(0)))["python"]
    assert found.verdict == "warn"
    assert f"{made} is closed to them" in found.text


def test_a_finding_of_several_lines_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("carma.cli.doctor.run_all", lambda: [Finding("settings", "bad", "one\ntwo", "do this")])
    result = CliRunner().invoke(carma, ["doctor"])
    assert result.output.splitlines() == ["bad  settings  one", "               two", "               → do this"]
