"""`carma dataset generate`: the same bytes for the same seed, spread over the ranges, and nothing outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from carma.errors import Usage
from gpumemnet import FAMILIES, Family
from gpumemnet.cli.dataset import command
from gpumemnet.dataset.config import Config, encode, ops_of, read_configs
from gpumemnet.dataset.program_memory import RoughEstimate
from gpumemnet.dataset.ranges import INPLACE, Ranges, load_ranges
from gpumemnet_fixtures.dataset_rows import generated

COUNT = 120
# Kinds whose output an activation may overwrite, because no other layer needs it.
FRESH = ("conv", "norm", "linear", "conv1d", "add")


@pytest.fixture(scope="module")
def ranges() -> Ranges:
    return load_ranges()


@pytest.fixture(scope="module")
def drawn(ranges: Ranges) -> dict[Family, list[Config]]:
    return {family: generated(family, COUNT, 1, ranges) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_of_a_longer_run_are_those_of_a_shorter_one(
    family: Family, drawn: dict[Family, list[Config]], ranges: Ranges
) -> None:
    again = [encode(config) for config in generated(family, 15, 1, ranges)]
    assert again == [encode(config) for config in drawn[family][:15]]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_gives_other_models(family: Family, drawn: dict[Family, list[Config]], ranges: Ranges) -> None:
    others = generated(family, 15, 2, ranges)
    assert all(one.model != other.model for one, other in zip(drawn[family], others, strict=False))
    assert others[3].id == f"{family}-2-000003"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_line_holds_all_that_was_drawn(family: Family, drawn: dict[Family, list[Config]]) -> None:
    for config in drawn[family]:
        assert encode(msgspec.json.decode(encode(config), type=Config)) == encode(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_run_keeps_to_the_ranges(family: Family, drawn: dict[Family, list[Config]], ranges: Ranges) -> None:
    section = getattr(ranges, family)
    low, high = section.batch
    for config in drawn[family]:
        guess = RoughEstimate(config, ranges.common)
        assert low <= config.batch <= high
        assert config.guess_mib == guess.mib(config.batch) <= section.footprint.high_mib[1]
        assert guess.step_s(config.batch) <= ranges.common.step_s * 1.001
        assert guess.sums.largest * config.batch <= ranges.common.tensor_elements


@pytest.mark.parametrize("family", FAMILIES)
def test_what_runs_take_is_spread(family: Family, drawn: dict[Family, list[Config]]) -> None:
    """Not heaped at the small end, where models drawn without an aim are."""
    counts = Counter(config.guess_mib // 1_000 for config in drawn[family])
    wide = 6 if family == "mlp" else 20
    assert len(counts) >= wide
    assert max(counts.values()) < COUNT / 3
    batches = sorted(config.batch for config in drawn[family])
    assert batches[COUNT // 5] <= 16
    assert batches[COUNT * 9 // 10] >= 128


def test_every_shape_and_setting_comes_up(ranges: Ranges, drawn: dict[Family, list[Config]]) -> None:
    configs = [config for family in FAMILIES for config in drawn[family]]
    assert {config.optimizer for config in configs} == set(ranges.common.optimizers)
    assert {config.precision for config in configs} == set(ranges.common.precisions)
    assert {config.shape for config in drawn["mlp"]} == set(ranges.mlp.shapes)
    assert {config.shape for config in drawn["cnn"]} == set(ranges.cnn.shapes)
    assert {config.shape for config in drawn["transformer"]} == set(ranges.transformer.shapes)
    assert {config.loss for config in configs} == {"classes", "values", "tokens", "pixels"}
    assert any(config.checkpointing for config in configs)
    assert any(config.channels_last for config in configs)


def test_channels_last_is_for_images(drawn: dict[Family, list[Config]]) -> None:
    assert all(len(config.input) == 3 for config in drawn["cnn"] if config.channels_last)


@pytest.mark.parametrize("norms", [{"none": 1.0}, {"batch": 1.0}], ids=["none", "batch"])
@pytest.mark.parametrize("family", ["mlp", "cnn"])
def test_values_that_a_backward_pass_needs_are_not_overwritten(
    family: Family, norms: dict[str, float], ranges: Ranges
) -> None:
    """Every shape, with activations in place wherever the generator lets them."""
    overwritten = 0
    for shape in getattr(ranges, family).shapes:
        one = {"shapes": {shape: 1.0}, "norms": norms, "inplace": 1.0, "activations": {"relu": 1.0}}
        section = msgspec.structs.replace(getattr(ranges, family), **one)
        for config in generated(family, 4, 5, msgspec.structs.replace(ranges, **{family: section})):
            for program in [config.model, *(body for op in ops_of(config.model) for body in _programs(op))]:
                overwritten += sum(_overwrites(program, number, config.id) for number in range(len(program)))
    assert overwritten > 0


def _overwrites(program: Sequence[Mapping[str, object]], number: int, name: str) -> bool:
    if not program[number].get("inplace"):
        return False
    assert program[number]["f"] in INPLACE
    assert number > 0, name
    assert program[number - 1]["op"] in FRESH, name
    return True


def _programs(op: object) -> list[list[dict[str, object]]]:
    assert isinstance(op, dict)
    return [*op.get("bodies", []), *(op[name] for name in ("body", "encoder", "decoder") if name in op)]


def test_the_verb_writes_a_file_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "configs.jsonl"
    done = CliRunner().invoke(
        command, ["generate", "--families", "cnn,mlp", "--count", "3", "--seed", "7", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert done.output == f"6 configs in {out}\n"
    names = [config.id for config in read_configs(out)]
    assert names == [f"{family}-7-{number:06}" for family in ("mlp", "cnn") for number in range(3)]


def test_the_verb_takes_ranges_of_ones_own(tmp_path: Path) -> None:
    own, out = tmp_path / "own.toml", tmp_path / "configs.jsonl"
    own.write_text("[mlp]\nshapes = { dense = 1 }\nbatch = [4, 8]\n[common]\noptimizers = { sgd = 1 }\n")
    words = ["generate", "--families", "mlp", "--count", "8", "--ranges", str(own), "--out", str(out)]
    assert CliRunner().invoke(command, words).exit_code == 0
    for config in read_configs(out):
        assert (config.shape, config.optimizer) == ("dense", "sgd")
        assert 4 <= config.batch <= 8


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "configs.jsonl"
    done = CliRunner().invoke(command, ["generate", "--count", "1", "--out", str(out)])
    assert isinstance(done.exception, Usage)
    assert str(out) in str(done.exception)


def test_the_help_lists_all_verbs() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    for name in ("generate", "collect", "pack", "describe"):
        assert f"\n  {name} " in text


def test_ranges_that_allow_nothing_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[common]\ntries = 1\ntensor_elements = 1\n")
    with pytest.raises(Usage, match="no cnn model"):
        generated("cnn", 1, 0, load_ranges(own))
