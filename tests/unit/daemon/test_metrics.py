"""The metrics: each has a real source, a missing figure is absent, and the endpoint answers only who may ask."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as families_of

from carma.config.settings_tree import Metrics
from carma.core.model.commands import Command
from carma.core.model.events import AnyEvent, AttemptSteps, Durable, GpuDrained, StepsCounted
from carma.core.model.outcome import Failed
from carma.core.model.values import GpuId, TaskId
from carma.daemon.metrics.endpoint import MetricsEndpoint, loopback_address, read_token
from carma.daemon.metrics.exposition import Counts, Exposition
from carma.daemon.metrics.families import CURRENT, FAMILIES
from carma.daemon.metrics.readings import Reading, read
from carma.errors import BadSettings
from carma.store.memory import MemoryStore
from carma.testing.builders import BOB, World
from tests.unit.daemon.shells import make_shell

METRICS_DOCS = Path(__file__).parents[3] / "docs" / "metrics"
GIB = 1024.0**3
Figures = dict[tuple[str, ...], float]  # (metric, values of its labels...)


class CountedWorld(World):
    """A server whose events are counted as the daemon's writer does it."""

    counts: Counts | None = None

    def emit(self, event: AnyEvent) -> list[Command]:
        commands = super().emit(event)
        if self.counts is not None and isinstance(event, Durable):
            self.counts.stepped(event, self.state)
        return commands


def figures(readings: list[Reading]) -> Figures:
    return {(name, *labels): value for name, labels, value in readings}


def busy_world() -> CountedWorld:
    """GPU 0: two tasks, one of which counts steps, and no DRAM activity. GPU 1: a fault. A third task has
    ended, a fourth ran out of memory and is retried, a fifth waits."""
    world = CountedWorld(2)
    world.counts = Counts()
    world.faults[GpuId("GPU-1")] = "the driver lost it"
    world.activity[GpuId("GPU-0")] = (0.5, 0.2, 0.1)
    world.wait(5)
    world.run(8_192)
    world.run(4_096, owner=BOB, name="secret-project")
    key = world.state.active[TaskId(1)]
    world.emit(StepsCounted(world.now, (AttemptSteps(key, 120, world.now),)))
    world.end(world.run(2_048))
    world.wait(5)
    world.settle()
    world.oom(world.run(2_048))
    world.settle()
    world.submit(40_000, held=True)
    world.activity[GpuId("GPU-0")] = (0.5, 0.2, None)
    world.wait(1)
    return world


def test_every_reading_has_a_source_and_a_missing_figure_is_absent() -> None:
    world = busy_world()
    found = figures(read(world.state, world.now))
    assert found["carma_gpu_up", "0"] == 1.0
    assert found["carma_gpu_up", "1"] == 0.0
    assert found["carma_gpu_memory_total_bytes", "1"] == 40 * GIB
    assert found["carma_gpu_sm_active_ratio", "0"] == pytest.approx(0.5)
    assert found["carma_gpu_power_watts", "0"] == 150.0
    assert found["carma_task_memory_bytes", "1", "alice", "0"] == 8 * GIB
    assert found["carma_task_booked_bytes", "2", "bob", "0"] == 4 * GIB
    parts = [found["carma_task_sm_ratio", task, user, "0"] for task, user in (("1", "alice"), ("2", "bob"))]
    assert sum(parts) == pytest.approx(0.5)
    assert found["carma_task_energy_joules_total", "1", "alice"] > 0.0
    assert found["carma_task_steps_total", "1", "alice"] == 120.0
    assert found["carma_waiting_tasks", "Held"] == 1.0
    assert found["carma_tasks", "running"] == 2.0
    assert found["carma_tasks", "estimating"] == 0.0
    absent = [
        *(("carma_gpu_dram_active_ratio", "0"), ("carma_gpu_power_watts", "1"), ("carma_gpu_memory_used_bytes", "1")),
        *(("carma_task_steps_total", "2", "bob"), ("carma_task_info", "3", "alice", "0")),
    ]
    assert not [one for one in absent if one in found]
    assert {name for name, *_ in found} == {family.name for family in CURRENT} - {"carma_gpu_dram_active_ratio"}


def test_a_task_has_series_only_while_it_runs() -> None:
    world = busy_world()
    world.activity[GpuId("GPU-0")] = (0.1, 0.1, 0.1)
    world.wait(30)
    world.settle()
    world.start()
    starting = world.submit(1_024)
    world.wait(30)
    world.settle()
    assert world.placed(starting)
    world.end(TaskId(1), Failed(1))
    world.sample()
    tasks = {labels[0] for name, labels, _ in read(world.state, world.now) if name.startswith("carma_task_")}
    assert tasks == {"2", "4"}


def test_a_drained_server_drains_every_gpu() -> None:
    world = World(2)
    world.emit(GpuDrained(world.now, None))
    found = figures(read(world.state, world.now))
    assert found["carma_gpu_drained", "0"] == found["carma_gpu_drained", "1"] == 1.0


def text_of(world: CountedWorld) -> str:
    assert world.counts is not None
    return generate_latest(Exposition(read(world.state, world.now), world.counts)).decode()


def test_counts_follow_the_events() -> None:
    world = busy_world()
    assert world.counts is not None
    world.counts.decided(0.003)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families_of(text_of(world))
        for sample in family.samples
    }
    assert found["carma_ooms_total", "own"] == 1.0
    assert sum(value for name, value in found.items() if name[0] == "carma_recoveries_total") == 1.0
    assert found["carma_tasks_finished_total", "succeeded"] == 1.0
    assert found["carma_task_wait_seconds_count",] == 4.0
    assert found["carma_estimate_error_ratio_count", "declared"] == 1.0
    assert found["carma_decision_seconds_bucket", "0.0025"] == 0.0
    assert found["carma_decision_seconds_bucket", "0.005"] == 1.0
    assert {name for name, *_ in found if name.endswith("_created")} == set()


def test_no_label_shows_what_a_task_runs_and_all_families_are_declared() -> None:
    text = text_of(busy_world())
    assert "train.py" not in text
    assert "secret-project" not in text
    named = {family.name for family in families_of(text)}
    assert named == {name.removesuffix("_total") for name in FAMILIES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_metrics_and_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text_of(busy_world()), text=True, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    for command in ("check rules rules.yml", "test rules rules_test.yml"):
        done = subprocess.run(["promtool", *command.split()], cwd=METRICS_DOCS, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_dashboard_name_only_metrics_that_exist() -> None:
    rules, board = (METRICS_DOCS / "rules.yml").read_text(), (METRICS_DOCS / "grafana.json").read_text()
    used = set(re.findall(r"\bcarma_[a-z_]+", rules + board))
    assert {re.sub(r"_(bucket|count|sum)$", "", name) for name in used} - {*FAMILIES} == set()
    names = re.findall(r"alert: (\w+)", rules)
    tests = (METRICS_DOCS / "rules_test.yml").read_text()
    assert [name for name in names if f"alertname: {name}\n" not in tests] == []
    assert all(
        panel["datasource"]["uid"] == "${datasource}" for panel in json.loads(board)["panels"] if "targets" in panel
    )


# -- the endpoint -----------------------------------------------------------------------------------------------------


async def ask(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    def work() -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return answer.status, answer.getheader("content-type", ""), answer.read().decode()
        finally:
            connection.close()

    return await asyncio.to_thread(work)


def test_the_endpoint_answers_who_has_the_token_and_names_this_machine(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    token_file.chmod(0o600)

    async def scenario() -> None:
        shell = make_shell(MemoryStore(), busy_world().state)
        endpoint = MetricsEndpoint(shell, Metrics(listen="127.0.0.1:0", token_file=str(token_file)))
        running = asyncio.create_task(endpoint.run())
        right = {"Authorization": "Bearer s3cret"}
        assert shell.recorder is not None
        status, kind, body = await ask(endpoint.port, **right)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert "carma_task_info" in body
        status, kind, body = await ask(endpoint.port, **right, Accept="application/openmetrics-text; version=1.0.0")
        assert (status, kind.split(";")[0]) == (200, "application/openmetrics-text")
        assert "carma_ooms" in {family.name for family in open_metrics(body)}  # type: ignore[no-untyped-call]
        assert (await ask(endpoint.port))[0] == 401
        assert (await ask(endpoint.port, Authorization="Bearer guess"))[0] == 401
        assert (await ask(endpoint.port, **right, Host="evil.example:9177"))[0] == 403
        assert (await ask(endpoint.port, **right, Host="localhost:9177"))[0] == 200
        assert (await ask(endpoint.port, "/api/v1/tasks", **right))[0] == 404
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        with pytest.raises(OSError):
            await ask(endpoint.port)

    asyncio.run(scenario())


def test_scrapes_within_a_second_read_the_state_once() -> None:
    async def scenario() -> tuple[str, str]:
        world = World(1)
        shell = make_shell(MemoryStore(), world.state)
        endpoint = MetricsEndpoint(shell, Metrics(listen="127.0.0.1:0"))
        endpoint._read_again_at_s = float("inf")  # within that second, however slow the machine
        endpoint._readings = read(world.state, world.now)
        running = asyncio.create_task(endpoint.run())
        first = await ask(endpoint.port)
        world.submit(1_000)
        second = await ask(endpoint.port)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return first[2], second[2]

    first, second = asyncio.run(scenario())
    assert 'carma_tasks{state="queued"} 0.0' in first
    assert first == second


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:9177", "[::]:9177", "192.0.2.7:9177", "gpu7.example:9177", "9177", "127.0.0.1"]
)
def test_an_address_that_is_not_loopback_is_refused(listen: str) -> None:
    with pytest.raises(BadSettings):
        loopback_address(listen)


def test_loopback_addresses_are_accepted() -> None:
    assert loopback_address("127.0.0.1:9177") == loopback_address("localhost:9177") == ("127.0.0.1", 9177)
    assert loopback_address("[::1]:9177") == ("::1", 9177)


def test_a_token_that_others_can_read_or_that_is_empty_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret")
    file.chmod(0o644)
    with pytest.raises(BadSettings):
        read_token(str(file))
    file.write_text("")
    file.chmod(0o600)
    with pytest.raises(BadSettings):
        read_token(str(file))
    with pytest.raises(BadSettings):
        read_token(str(tmp_path / "none"))
    assert read_token("") == b""
