"""Settings: which source wins, where a value came from, and what a mistake is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from carma.config import Settings, catalogue, describe, load_settings
from carma.core.model.settings import Rules
from carma.errors import BadSettings
from carma.paths import Paths

Write = Callable[[str], Paths]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(
        layout="user",
        config_file=tmp_path / "user.toml",
        system_config_file=tmp_path / "system.toml",
        state_dir=tmp_path,
        log_dir=tmp_path,
        socket=tmp_path / "s",
    )


@pytest.fixture
def write(paths: Paths) -> Write:
    def put(text: str) -> Paths:
        paths.config_file.write_text(text)
        return paths

    return put


def refused(paths: Paths, environ: dict[str, str] | None = None, flags: dict[str, object] | None = None) -> str:
    with pytest.raises(BadSettings) as caught:
        load_settings(paths, environ or {}, flags)
    return str(caught.value)


def test_without_any_source_every_value_is_the_default(paths: Paths) -> None:
    settings, origins = load_settings(paths, {"CARMA_HOME": "/x", "PATH": "/bin"})
    assert settings == Settings()
    assert settings.rules == Rules()
    assert set(origins.values()) == {"default"}
    assert set(origins) == set(catalogue())


def test_the_nearer_source_wins_and_is_named(paths: Paths) -> None:
    assert paths.system_config_file is not None
    paths.system_config_file.write_text(
        "[gate]\nsm_active = 0.1\nsm_occupancy = 0.1\ndram_active = 0.1\n[queue]\novertakes = 1"
    )
    paths.config_file.write_text("[gate]\nsm_active = 0.2\nsm_occupancy = 0.2\ndram_active = 0.2\n")
    environ = {"CARMA_GATE__SM_ACTIVE": "0.3", "CARMA_GATE__SM_OCCUPANCY": "0.3"}
    settings, origins = load_settings(paths, environ, {"gate.sm_active": 0.4, "placement.policy": None})
    assert (settings.gate.sm_active, origins["gate.sm_active"]) == (0.4, "flag --set gate.sm_active")
    assert (settings.gate.sm_occupancy, origins["gate.sm_occupancy"]) == (0.3, "environment CARMA_GATE__SM_OCCUPANCY")
    assert (settings.gate.dram_active, origins["gate.dram_active"]) == (0.2, str(paths.config_file))
    assert (settings.queue.overtakes, origins["queue.overtakes"]) == (1, str(paths.system_config_file))
    assert (settings.placement.policy, origins["placement.policy"]) == ("goodput", "default")
    assert settings.rules.gate is settings.gate


def test_a_flag_is_named_as_the_user_wrote_it(paths: Paths) -> None:
    _, origins = load_settings(paths, {}, {"placement.policy": "lug", "virtual.gpu_memory_mib": "16GiB"})
    assert origins["placement.policy"] == "flag --policy"
    assert origins["virtual.gpu_memory_mib"] == "flag --gpu-memory"


def test_sizes_durations_lists_and_switches_as_people_write_them(write: Write) -> None:
    paths = write('[memory]\nmargin_mib = "1GiB"\n[window]\nlength_s = "2m"\n[stopping]\ngrace_s = "15"\n')
    environ = {
        "CARMA_MEMORY__SOURCES": "declared, history",
        "CARMA_WARMUP__ENABLED": "off",
        "CARMA_WARMUP__GROWTH_MIB": "0",
        "CARMA_VIRTUAL__GPU_MEMORY_MIB": "40G",
        "CARMA_DAEMON__ADMINS": "",
        "CARMA_GATE__SUMMARY": "p95",
    }
    settings, _ = load_settings(paths, environ, {"virtual.gpus": "4", "virtual.speed": 60})
    assert settings.memory.margin_mib == 1024
    assert settings.window.length_s == 120.0
    assert settings.stopping.grace_s == 15.0  # a bare number is seconds here, not Slurm's minutes
    assert settings.memory.sources == ("declared", "history")
    assert settings.warmup.enabled is False
    assert settings.warmup.growth_mib == 0
    assert settings.virtual.gpu_memory_mib == 40_960
    assert settings.daemon.admins == ()
    assert settings.gate.summary == "p95"
    assert (settings.virtual.gpus, settings.virtual.speed) == (4, 60.0)


def test_recovery_only_is_an_empty_list_of_sources(write: Write) -> None:
    assert load_settings(write("[memory]\nsources = []"), {}).settings.memory.sources == ()


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("[gate]\nsm_activ = 0.5", "gate.sm_active"),
        ("[gates]\nsm_active = 0.5", "gate"),
        ('policy = "lug"', "placement.policy"),
        ('[gate]\npolicy = "lug"', "placement.policy"),
        ('[virtual]\ngpu_memory = "1GiB"', "virtual.gpu_memory_mib"),
    ],
)
def test_an_unknown_name_leads_to_the_nearest_one(write: Write, text: str, near: str) -> None:
    paths = write(text)
    message = refused(paths)
    assert f"did you mean {near!r}?" in message
    assert str(paths.config_file) in message


def test_an_unknown_variable_is_not_ignored(paths: Paths) -> None:
    message = refused(paths, {"CARMA_GATE__SM_ACTIV": "1"})
    assert "environment CARMA_GATE__SM_ACTIV" in message
    assert "'gate.sm_active'" in message


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("gate.sm_active", "1.5", "a number from 0 to 1"),
        ("gate.sm_active", "nan", "a number from 0 to 1"),
        ("gate.sm_active", "true", "a number from 0 to 1"),
        ("warmup.idle_s", "inf", "a number of seconds of at least 0"),
        ("gate.enabled", "1", "true or false"),
        ("gate.enabled", '"maybe"', "true or false"),
        ("gate.summary", '"worst"', "one of mean, p95, risk"),
        ("placement.tasks_per_gpu", "0", "a whole number of at least 1"),
        ("placement.tasks_per_gpu", "1.5", "a whole number of at least 1"),
        ("placement.policy", "3", "a text"),
        ("memory.unknown_mib", '"lots"', "such as 12GiB"),
        ("memory.unknown_mib", "{}", "such as 12GiB"),
        ("window.length_s", '"0"', "a number of seconds above 0"),
        ("sharing.watch_s", "1e9", "a number of seconds above 0 and of at most 60"),
        ("memory.sources", "[1]", "a list of texts"),
    ],
)
def test_a_wrong_value_names_the_setting_what_is_allowed_and_the_file(
    write: Write, name: str, value: str, allowed: str
) -> None:
    section, key = name.split(".")
    paths = write(f"[{section}]\n{key} = {value}")
    message = refused(paths)
    assert message.startswith(f"{name} = ")
    assert allowed in message
    assert str(paths.config_file) in message


def test_every_mistake_is_reported_at_once(write: Write) -> None:
    message = refused(write("[gate]\nsm_active = 7\nsm_activ = 1"), {"CARMA_QUEUE__OVERTAKES": "many"})
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize("content", [b"[gate", b"\xff\xfe\x00", b"gate = 3", b"[gate]\na = 1\na = 2"])
def test_a_file_that_is_not_understood_is_named(paths: Paths, content: bytes) -> None:
    paths.config_file.write_bytes(content)
    assert str(paths.config_file) in refused(paths)


def test_a_directory_in_the_place_of_the_file_is_an_error(paths: Paths) -> None:
    paths.config_file.mkdir()
    assert "cannot be read" in refused(paths)
    with pytest.raises(BadSettings) as caught:
        load_settings(paths, {})
    assert "CARMA_HOME" in caught.value.hint


def test_describe_lists_every_setting_with_a_sentence(paths: Paths) -> None:
    settings, origins = load_settings(paths, {"CARMA_MONITOR__PERIOD_S": "0.5"})
    lines = {line.name: line for line in describe(settings, origins)}
    assert set(lines) == set(catalogue())
    assert all(line.description.endswith(".") for line in lines.values())
    line = lines["monitor.period_s"]
    assert (line.value, line.origin) == (0.5, "environment CARMA_MONITOR__PERIOD_S")


def as_toml(value: object) -> str:
    """JSON's way to write texts, numbers, switches and lists is TOML's too."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


def test_every_default_is_itself_allowed(paths: Paths) -> None:
    defaults = {name: setting.default for name, setting in catalogue().items()}
    tables = msgspec.to_builtins(Settings())
    lines = [
        line
        for section, keys in tables.items()
        if section != "plugins"
        for line in (f"[{section}]", *(f"{key} = {as_toml(value)}" for key, value in keys.items()))
    ]
    paths.config_file.write_text("\n".join(lines))
    from_file = load_settings(paths, {})
    from_flags = load_settings(paths, {}, defaults)
    assert from_file.settings == from_flags.settings == Settings()
    assert set(from_file.origins.values()) == {str(paths.config_file)}


def test_windows_hold_the_samples_wanted_of_them_however_rarely_they_come() -> None:
    from carma.core.model.settings import Rules
    from carma.core.telemetry.window import sampled_every

    usual = Rules()
    assert sampled_every(usual, 1.0) == usual
    rare = sampled_every(usual, 100.0)
    assert rare.window.length_s >= rare.window.min_samples * 100.0
    assert rare.window.stale_s > 2 * 100.0
    assert rare.gate == usual.gate


def test_a_setting_by_user_is_a_number_for_all_or_one_for_each(paths: Paths, write: Write) -> None:
    write('[quota]\ngpus = 4\nrunning = {default = 2, anna = 9}\n[quota.waiting]\n"uid 77" = 3\n')
    rules = load_settings(paths, {}, {"quota.memory_share": "0.5", "fairness.shares": "anna=2, default = 0.5"}).settings
    assert rules.quota.gpus == {"default": 4}
    assert rules.quota.running == {"default": 2, "anna": 9}
    assert rules.quota.waiting == {"uid 77": 3}
    assert rules.quota.memory_share == {"default": 0.5}
    assert rules.fairness.shares == {"anna": 2.0, "default": 0.5}


@pytest.mark.parametrize(
    "value", ["anna", "anna=", "anna=x", "anna=1,anna=2", "-1", "anna=1.5", "true", {"anna": -1}, {"anna": True}, [4]]
)
def test_a_setting_by_user_that_cannot_be_used_is_named(paths: Paths, value: object) -> None:
    told = refused(paths, flags={"quota.gpus": value})
    assert "quota.gpus" in told
    assert "a whole number of at least 0 for all users, or by user: default=1,anna=2" in told


def test_a_share_of_nothing_is_none(paths: Paths) -> None:
    assert "a number above 0" in refused(paths, flags={"fairness.shares": {"anna": 0}})
