"""`carma estimate`: who is asked for what, what is printed, and what is said of a mistake."""

from __future__ import annotations

import json
import os
from functools import partial

import msgspec
import pytest
from msgspec.structs import replace

from carma.cli import main
from carma.config.settings_tree import Settings
from carma.core.model.settings import Memory
from carma.core.model.values import Demand, Estimate
from carma.core.ports import EstimateRequest
from carma.trial.protocol import Context, Trial
from carma.trial.report import TrialReport
from tests.harness import until
from tests.unit.cli.estimate_world import ANSWER, LOCAL, NAMES, SECOND, World, figures, printed


def test_the_command_is_asked_about_as_it_would_run_here(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--", "sh", "-c", "exit 0", "--gpu", "x")
    (request,) = world.requests
    assert request.spec.command == ("sh", "-c", "exit 0", "--gpu", "x")
    assert request.spec.directory == os.getcwd()
    assert request.spec.environment == dict(os.environ)
    assert request.owner.uid == os.getuid()
    assert [(gpu.name, gpu.memory_mib) for gpu in request.gpus] == [("NVIDIA H200", 143_155)]


def test_words_without_dashes_are_the_command_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "sh", "-c", "exit 0", "--", "--json")
    assert world.requests[0].spec.command == ("sh", "-c", "exit 0", "--", "--json")


def test_several_gpus(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--gpu", "h200", "--gpus", "2", "--", "sh")
    (request,) = world.requests
    assert request.spec.gpus == len(request.gpus) == len({gpu.index for gpu in request.gpus}) == 2
    assert "each of 2 GPUs (NVIDIA H200)" in text
    assert "carma submit --gpus 2 --gpu-mem 5427M -- sh" in text


def test_several_of_a_gpu_that_is_here_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.here = (LOCAL,)
    printed(capsys, "--gpu-count", "3", "--", "sh")
    gpus = world.requests[0].gpus
    assert gpus[0] == LOCAL
    assert len({gpu.id for gpu in gpus}) == len({gpu.index for gpu in gpus}) == 3
    assert {gpu.name for gpu in gpus} == {"NVIDIA A30"}


def test_limits_of_the_trial_are_the_flags(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--limit", "45", "--steps", "5", "--", "sh")
    ((rules, steps),) = world.trials_asked
    assert (rules.memory.trial_limit_s, steps) == (45.0, 5)


def test_limits_of_the_trial_are_the_settings_otherwise(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--gpu", "h200", "--", "sh")
    assert world.trials_asked == [(Settings(), None)]


@pytest.mark.skipif("level" not in Memory.__struct_fields__, reason="there is no such setting")
def test_the_level_of_the_bound(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def by_level(context: Context, _request: EstimateRequest) -> Estimate:
        return msgspec.structs.replace(ANSWER, level=getattr(context.rules.memory, "level", None))

    world.says["trace"] = by_level
    assert figures(capsys, "--gpu", "h200", "--level", "0.95", "--", "sh")["level"] == 0.95


@pytest.mark.parametrize(
    ("wanted", "name", "memory_mib"),
    [
        ((), "NVIDIA A30", 24_000),
        (("--gpu", "1"), "NVIDIA Prototype", 9_000),
        (("--gpu", "GPU-3333"), "NVIDIA Prototype", 9_000),
        (("--gpu", "nvidia prototype"), "NVIDIA Prototype", 9_000),
        (("--gpu", "L4"), "NVIDIA L4", 22_480),
    ],
)
def test_a_gpu_of_this_machine_or_of_the_catalogue(
    world: World, capsys: pytest.CaptureFixture[str], wanted: tuple[str, ...], name: str, memory_mib: int
) -> None:
    world.here = (LOCAL, SECOND)
    assert figures(capsys, *wanted, "--", "sh")["gpu"] == name
    assert world.requests[0].gpus[0].memory_mib == memory_mib


def test_without_a_gpu_a_note_names_the_assumed_model(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--json", "--", "sh"]) == 0
    caught = capsys.readouterr()
    assert "the estimate is for an NVIDIA H200" in caught.err
    assert json.loads(caught.out)["gpu"] == "NVIDIA H200"
    assert world.requests


# What is answered


def test_a_long_trial_run_is_announced_on_stderr_with_json_too(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carma.cli.output.ANNOUNCED_AFTER_S", 0.0)
    seen = ""

    def announced() -> bool:
        nonlocal seen
        seen += capsys.readouterr().err
        return "carma: trial run of sh on an emulated GPU ..." in seen

    def say(_context: Context, _request: EstimateRequest) -> Estimate:
        until(announced, "the trial run is announced", 20)
        return ANSWER

    world.says["trace"] = say
    assert main(["estimate", "--gpu", "h200", "--json", "--", "sh"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == "NVIDIA H200"


def test_json_has_the_promised_names(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    row = figures(capsys, "--gpu", "h200", "--", "sh")
    assert set(row) == NAMES
    assert world.says
    assert row.pop("took_s") >= 0
    assert row == {
        "estimator": "trace",
        "gpu": "NVIDIA H200",
        "allocated_mib": 3_900,
        "reserved_mib": 4_240,
        "footprint_mib": 5_000,
        "bound_mib": 5_427,
        "level": 0.99,
        "steps_seen": 3,
        "rests_on": "",
        "warnings": ["torch.compile was not followed"],
        "parts_mib": {"weights": 400, "optimizer_state": 800, "context": 760},
        "demand": None,
        "demand_predicted": False,
    }


def _say(said: Estimate, *_: object) -> Estimate:
    return said


def test_the_demand_is_printed_and_marked_if_predicted(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    busy = Demand(sm_active=0.45, sm_occupancy=0.2, dram_active=0.004, gr_active=0.71, power=0.5)
    for predicted in (True, False):
        world.says["trace"] = partial(_say, replace(ANSWER, demand=busy, demand_predicted=predicted))
        text = " ".join(printed(capsys, "--gpu", "h200", "--", "sh").split())
        assert "SM activity 45 %, SM occupancy 20 %, DRAM 0 %, any kernel 71 %" in text
        assert ("predicted" in text) == predicted
        row = figures(capsys, "--gpu", "h200", "--", "sh")
        assert row["demand"] == {
            "sm_active": 0.45, "sm_occupancy": 0.2, "dram_active": 0.004, "gr_active": 0.71, "power": 0.5,
        }  # fmt: skip
        assert row["demand_predicted"] is predicted


def test_the_answer_comes_first(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--gpu", "h200", "--", "sh", "a b").splitlines()
    assert lines[0] == "4.9 GiB (at most 5.3 GiB at 99 %) on an NVIDIA H200"
    text = "\n".join(lines)
    for said in ("optimizer state", "3.8 GiB allocated", "3 optimizer steps", "torch.compile was not followed"):
        assert said in text
    assert "carma submit --gpu-mem 5427M -- sh 'a b'" in text
    assert "fit" not in text
    assert world.requests


@pytest.mark.parametrize(
    ("footprint_mib", "upper_mib", "said"),
    [(20_000, 22_000, ""), (20_000, 25_000, "it may not fit"), (30_000, 31_000, "it does not fit")],
)
def test_a_card_that_is_too_small(
    world: World, capsys: pytest.CaptureFixture[str], footprint_mib: int, upper_mib: int, said: str
) -> None:
    world.here = (LOCAL,)
    world.says["trace"] = lambda _c, _r: Estimate(footprint_mib=footprint_mib, upper_mib=upper_mib, source="trace")
    text = printed(capsys, "--", "sh")
    assert ("fit" in text) is bool(said)
    assert said in text
    assert ("--gpu-mem" in text) is (not said)  # more than the memory of the card cannot be booked
    assert ("v100-32gb, a100-40gb" in " ".join(text.split())) is bool(said)


@pytest.mark.parametrize(
    ("upper_mib", "cards"),
    [(100_000, ["h200", "b200"]), (16_000_000, [])],
)
def test_the_cards_that_have_room_are_listed(
    world: World, capsys: pytest.CaptureFixture[str], upper_mib: int, cards: list[str]
) -> None:
    world.here = (LOCAL,)
    world.says["trace"] = lambda _c, _r: Estimate(footprint_mib=30_000, upper_mib=upper_mib, source="trace")
    text = " ".join(printed(capsys, "--", "sh").split())
    assert "this GPU has 23.4 GiB" in text
    assert [card for card in ("h100", "h200", "b200") if card in text] == cards


def test_the_warning_about_room_is_printed_once(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    warnings = ("it does not fit: NVIDIA A30 has 23.4 GiB", "something else")
    large = Estimate(footprint_mib=30_000, upper_mib=31_000, level=0.99, source="trace", warnings=warnings)
    world.here, world.says["trace"] = (LOCAL,), lambda _c, _r: large
    text = printed(capsys, "--", "sh")
    assert text.count("fit") == 1
    assert "something else" in text
    assert figures(capsys, "--", "sh")["warnings"] == list(warnings)


def test_a_small_model_has_weights_too(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    small = msgspec.structs.replace(ANSWER, allocated_mib=0, parts_mib={"weights": 0, "context": 760})
    world.says["trace"] = lambda _c, _r: small
    text = printed(capsys, "--gpu", "h200", "--", "sh")
    assert " 0 MiB" not in text
    assert text.count("< 1 MiB") == 2
    assert figures(capsys, "--gpu", "h200", "--", "sh")["parts_mib"] == {"weights": 0, "context": 760}


@pytest.mark.parametrize(("seconds", "remembered"), [(6.9e6, True), (0.0, False)])
def test_a_trial_that_was_made_before_is_called_so(
    world: World, capsys: pytest.CaptureFixture[str], seconds: float, remembered: bool
) -> None:
    def by_trial(context: Context, request: EstimateRequest) -> Estimate:
        assert isinstance(context.trials.run(request), Trial)
        return ANSWER

    world.trials.answer = Trial(TrialReport(format=1, stop="steps", steps=3), b"", seconds)
    world.says["trace"] = by_trial
    text = " ".join(printed(capsys, "--gpu", "h200", "--", "sh").split())
    assert ("cached" in text and "6900000.0 s" in text) is remembered
    assert ("; took " in text) is not remembered


def test_an_estimate_without_a_trial_is_not_called_cached(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.trials.answer = Trial(TrialReport(format=1, stop="steps", steps=3), b"", 6.9e6)
    assert "cached" not in printed(capsys, "--gpu", "h200", "--", "sh")


def test_a_formula_has_no_bound(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.says["plain"] = lambda _c, _r: Estimate(footprint_mib=7_000, upper_mib=7_000, source="plain")
    text = printed(capsys, "--gpu", "t4", "--estimator", "plain", "--", "sh")
    assert text.startswith("6.8 GiB, without a bound, on a Tesla T4\n")
    assert "--gpu-mem" not in text
    row = figures(capsys, "--gpu", "t4", "--estimator", "plain", "--", "sh")
    assert (row["footprint_mib"], row["bound_mib"], row["level"]) == (7_000, None, None)
