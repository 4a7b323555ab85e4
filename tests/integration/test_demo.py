"""The demo and its private daemons, for real: two daemons, real processes on virtual GPUs, nothing left behind."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from carma.core.model.values import TaskSpec
from carma.demo import comparison
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, wait_until
from carma.wire.api_types import SubmitRequest

HEADER = "arrival_s,name,gpus,memory_mib,seconds,sm_active,sm_occupancy,dram_active"
ROWS = (
    "0,first,1,4000,60,0.3,0.13,0.1",
    "0,second,1,4000,60,0.3,0.13,0.1",
    "1,both,2,4000,40,0.3,0.13,0.1",
    "2,small,1,1000,40,0.1,0.05,0.05",
    "2,smaller,1,800,40,0.1,0.05,0.05",
    "3,last,1,6000,20,0.4,0.2,0.2",
)


def processes_of(home: Path) -> list[int]:
    """Living processes that were started with this CARMA_HOME."""
    mark = f"CARMA_HOME={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_six_tasks_end_in_a_table_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "six.csv"
    trace.write_text("\n".join([HEADER, *ROWS]))
    code = comparison.run(comparison.Options(trace=str(trace), speed=150.0, gpus=2, json=True))
    answer = json.loads(capsys.readouterr().out)
    assert answer["command"] == f"carma demo --trace {trace} --speed 150 --virtual-gpus 2 --json"
    assert answer["machine"]["cores"] >= 1
    assert datetime.date.fromisoformat(answer["date"])
    assert code == 0, answer
    for run in ("exclusive", "collocated"):
        figures = answer[run]
        assert (figures["tasks"], figures["succeeded"], figures["ooms"]) == (6, 6, 0)
        assert figures["slowdown_mean"] > 0
        assert figures["makespan_s"] >= 60, "not shorter than the longest task"
        assert 0 < figures["sm_active"] <= 1
        assert figures["energy_j"] > 0
    assert answer["exclusive"]["makespan_s"] >= 149, "300 GPU seconds on two GPUs, one task at a time on each"
    assert answer["kept"] == []


def test_a_private_daemon_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with PrivateDaemon(PrivateSettings(gpus=1)) as daemon:
        home = daemon.home
        spec = TaskSpec(command=("sleep", "600"), directory=str(tmp_path), environment=daemon.environment)
        task = daemon.client.submit(SubmitRequest(spec=spec)).ids[0]
        wait_until(lambda: daemon.client.task(task).state == "running", 60.0, "the task did not start")
        pid = daemon.client.task(task).attempts[-1].pid
        assert pid is not None
        assert processes_of(home)
    wait_until(lambda: not processes_of(home), 60.0, "processes were left behind")
    assert not home.exists()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_daemon_that_cannot_start_says_why() -> None:
    private = PrivateDaemon(PrivateSettings(policy="no-such-policy"))
    with pytest.raises(Exception, match="no-such-policy"), private:
        pass
    assert not private.home.exists()
