"""The wording of errors and findings, in golden files. Other tests assert codes, numbers and names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.cli.checks import gpu_checks, sharing_checks
from carma.cli.checks.doctor_facts import Finding
from carma.errors import NoGpus
from carma.monitor.card_modes import CardFacts, MachineFacts
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, task_view
from tests.unit.cli.test_doctor import COARSE, INFERRED, Machine, gpu

SUBMIT = (
    "submit",
    "submit --gpus 0 -- true",
    "submit --gres cpu:2 -- true",
    "submit --gpu-mem lots -- true",
    "submit --time soon -- true",
    "submit --signal USR1@9 -- true",
    "submit --signal USR1@soon -- true",
    "submit --checkpoint-grace 60 -- true",
    "submit --checkpoint-signal KILL -- true",
    "submit --checkpoint-signal SAVE -- true",
    "submit --mechanism timeslice --threads-percent 20 -- true",
    "submit --threads-percent 101 -- true",
    "submit --priority high -- true",
    "submit --stdin -- true",
    "submit --array 9-1 -- true",
    "submit --array 0-1000000000 -- true",
    "submit --array 1,1000000000 -- true",
    "submit --dependency after:12 -- true",
    "submit --begin yesterday -- true",
    "submit --export A-B -- true",
    "submit --grace 1e12 -- true",
    "submit --name  -- true",
    "submit --param lr -- true",
    "submit --param lr=1 --param lr=2 -- true {lr}",
    "submit --param lr=1,2 -- true",
    "submit --chdir /nowhere -- true",
    "submit --file /nowhere",
    "submit --file /dev/null",
    "submit --file .",
    "submit nosuch.sh",
    "submit --gpu-mem 3 -- true",
    "submit --begin 2020-01-01 --gres gpu:a100:1 -- true",
    "submit python nosuch.py --gpu-mem 3G",
    "submit --mem 4G -c 8 -p gpu -- true",
)
OTHERS = (
    "sumbit",
    "show x",
    "show 7",
    "show 1-2",
    "wait 1-99999",
    "cancel",
    "cancel --name none",
    "hold --all",
    "update 1",
    "queue -o id,stat",
    "queue -n -1",
    "history --since later",
    "run --array 0-3 -- true",
    "up --set gate",
    "up --set gate.sm_activ=1",
    "up --set gate.sm_active=2",
    "up --config /nowhere.toml",
    "up --speed 0",
    "up --speed 2",
    "up --user",
    "up --print-unit --detach",
    "completion",
    "events --task 99",
    "queue --json -o id",
    "history --efficiency -o id",
    "config show gat",
    "config check /nowhere.toml",
    "logs 1",
    "logs 2",
    "estimate",
    "estimate --compare --estimator trace -- true",
    "estimate --batch 3 -- true",
    "estimate --steps 3 --summary x.txt",
    "estimate --limit 0 -- true",
    "estimate --level 1.5 -- true",
    "estimate --summary x.txt --input 3xx",
    "estimate --gpu h2000 -- true",
    "calibrate --limit 3s",
    "demo --trace none",
)
FILES = {
    "short.rad": "a\nb\n",
    "empty.rad": "",
    "conda.rad": "#\nsource x\ntrue\n\n\n\n\n1\n",
    "number.rad": "#\n\ntrue\n\n\n\n\ntwo\n",
    "quotes.rad": "#\n\ntrue 'open\n\n\n\n\n1\n",
    "syntax.toml": "= 1\n",
    "key.toml": "gpu_memm = 1\n",
    "command.toml": "command = 3\n",
    "no_command.toml": "gpus = 1\n",
    "value.toml": 'command = "true"\ntime = {a = 1}\n',
    "environment.toml": 'command = "true"\nenvironment = 1\n',
    "twice.toml": 'gpus = 1\n[task]\ncommand = ["true"]\ngpus = 2\n',
    "words.sh": "#!/bin/sh\n#CARMA true\n",
    "sbatch.sh": "#!/bin/sh\n#SBATCH --constraint=a100\n",
    "quotes.sh": "#!/bin/sh\n#CARMA -J 'open\n",
}


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.chdir(tmp_path)
        fake.tasks = {1: task_view(1), 2: finished(2)}
        yield fake


def said(words: list[str], standard_input: str = "") -> str:
    result = CliRunner().invoke(carma, words, input=standard_input)
    return f"exit code {result.exit_code}\n{result.stdout}{result.stderr}"


@pytest.mark.usefixtures("daemon")
def test_errors_of_submissions_have_the_wording_of_the_golden_file(tmp_path: Path) -> None:
    sentences = {line: said(line.split(" ")) for line in SUBMIT}
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        sentences[f"submit --file {name}: {text!r}"] = said(["submit", "--file", name])
    for text in ("", "true\n\nno-such-program\n", "true\necho 'open\n"):
        sentences[f"submit --stdin: {text!r}"] = said(["submit", "--stdin"], text)
    assert_wording("cli_submissions", sentences)


@pytest.mark.usefixtures("daemon")
def test_errors_of_verbs_have_the_wording_of_the_golden_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise NoGpus("no driver answers", "install one")

    monkeypatch.setattr("carma.monitor.nvml.open_nvml", none)
    assert_wording("cli_errors", {line: said(line.split()) for line in OTHERS})


def finding_text(found: Finding | None) -> str:
    return (
        "none"
        if found is None
        else f"{found.verdict}: {found.text}"
        + "".join(f"\n→ {more}" for more in (found.hint, found.limitation) if more)
    )


def card(**facts: Any) -> CardFacts:
    return CardFacts(index=0, **facts)


def test_findings_of_the_doctor_have_the_wording_of_the_golden_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sharing_checks, "find_program", lambda _environment: None)
    monkeypatch.setattr(sharing_checks, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(sharing_checks, "DEVICES", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = {
        "driver": gpu_checks.driver(Machine(gpu(0), cards=(card(fault="it does not answer"),))),
        "no GPU": gpu_checks.gpus(Machine()),
        "virtual GPUs": gpu_checks.gpus(Machine(virtual=2)),
        "virtual GPU": gpu_checks.gpus(Machine(virtual=1)),
        "activity": gpu_checks.activity(Machine(gpu(0), gpu(1))),
        "no activity": gpu_checks.activity(Machine(gpu(0, COARSE), gpu(1))),
        "no activity for the gate": gpu_checks.activity(Machine(gpu(0, COARSE), placement__policy="magm")),
        "inferred activity for the gate": gpu_checks.activity(Machine(gpu(0, INFERRED), placement__policy="magm")),
        "no activity, no gate": gpu_checks.activity(
            Machine(gpu(0, COARSE), gate__enabled=False, placement__policy="magm")
        ),
        "activity inferred": gpu_checks.activity(Machine(gpu(0, INFERRED), gpu(1))),
        "activity inferred by a setting": gpu_checks.activity(
            Machine(gpu(0, INFERRED), gpu(1, COARSE), monitor__sm_activity="inferred")
        ),
        "GPM forbidden": gpu_checks.activity(Machine(gpu(0, COARSE), cards=(card(gpm="forbidden"),))),
        "MIG off": gpu_checks.mig(Machine(gpu(0), cards=(card(mig=False, mig_pending=True),))),
        "MIG without instances": gpu_checks.mig(Machine(gpu(0), cards=(card(mig=True, mig_pending=True),))),
        "MIG wanted, off": gpu_checks.mig(Machine(gpu(0), cards=(card(mig=False),), sharing__mechanism="mig")),
        "MIG wanted, unknown": gpu_checks.mig(Machine(gpu(0), cards=(card(),), sharing__mechanism="mig")),
        "MIG wanted, virtual": gpu_checks.mig(Machine(virtual=2, sharing__mechanism="mig")),
        "mode DEFAULT": gpu_checks.modes(Machine(gpu(0))),
        "mode PROHIBITED": gpu_checks.modes(Machine(gpu(0), cards=(card(compute_mode="prohibited"),))),
        "mode EXCLUSIVE": gpu_checks.modes(Machine(gpu(0), cards=(card(compute_mode="exclusive_process"),))),
        "persistence": gpu_checks.persistence(Machine(gpu(0), cards=(card(persistence=False),))),
        "no MPS": sharing_checks.mps(Machine(gpu(0))),
        "no MPS, wanted": sharing_checks.mps(Machine(gpu(0), sharing__mechanism="mps")),
        "MPS unused": sharing_checks.mps(Machine(gpu(0), sharing__mechanism="timeslice")),
        "caps": sharing_checks.memory_limits(Machine(gpu(0))),
        "caps, no watchdog": sharing_checks.memory_limits(Machine(gpu(0), sharing__watchdog=False)),
        "no caps": sharing_checks.memory_limits(Machine(gpu(0), sharing__caps=False)),
        "no caps, no watchdog": sharing_checks.memory_limits(
            Machine(gpu(0), sharing__caps=False, sharing__watchdog=False)
        ),
        "caps, virtual": sharing_checks.memory_limits(Machine(virtual=2)),
        "permissions": sharing_checks.permissions(Machine(gpu(0))),
    }
    (tmp_path / "mounts").write_text("proc /proc proc rw,hidepid=2 0 0\n")
    found["permissions, hidepid"] = sharing_checks.permissions(Machine(gpu(0)))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found["permissions, root"] = sharing_checks.permissions(Machine(gpu(0)))
    found["permissions, all as root"] = sharing_checks.permissions(Machine(gpu(0), launch__run_as_submitter="no"))
    monkeypatch.setattr("carma.cgroups.oom_kills", lambda: None)
    for driver in ("580.159", "615.10"):
        machine = Machine(gpu(0))
        machine.machine = MachineFacts(driver=driver)
        found[f"cgroup, driver {driver}"] = sharing_checks.cgroup(machine)  # the version is this machine's
    text = {name: finding_text(finding) for name, finding in found.items()}
    assert_wording("doctor", {name: re.sub(r": (no )?version 2", ": VERSION", each) for name, each in text.items()})
