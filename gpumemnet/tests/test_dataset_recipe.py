"""`carma dataset generate` and the file it writes: other recipes' configs are kept; missed targets are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carma.cli import main
from gpumemnet.dataset.config import read_configs
from gpumemnet.dataset.generate import Aimed
from gpumemnet.dataset.ranges import load_ranges
from gpumemnet_fixtures.dataset_rows import config, generated
from tests.docs.markdown import blocks

PAGE = Path(__file__).parents[2] / "docs" / "gpumemnet-training.md"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "configs.jsonl"


def made(out: Path, *words: str) -> int:
    return main(["dataset", "generate", "--families", "mlp", "--out", str(out), *words])


def test_the_same_file_may_be_made_again_and_longer(out: Path) -> None:
    assert made(out, "--count", "2") == 0
    first = out.read_bytes()
    assert made(out, "--count", "2") == 0
    assert out.read_bytes() == first
    assert made(out, "--count", "5") == 0
    assert out.read_bytes().startswith(first)
    assert [path.name for path in out.parent.iterdir()] == ["configs.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--count", "3", "--seed", "1"], "3 of its configs are not made by this command, mlp-0-000000 is one"),
        (["--count", "2"], "1 of its configs are not made by this command, mlp-0-000002 is one"),
        (["--count", "3", "--ranges"], "its mlp-0-000000 was drawn from other ranges"),
    ],
)
def test_another_recipes_configs_are_not_overwritten_without_force(
    out: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(out, "--count", "3") == 0
    before = out.read_bytes()
    if words[-1] == "--ranges":
        other = out.with_name("ranges.toml")
        other.write_text("[mlp]\nbatch = [1, 4]\n")
        words = [*words, str(other)]
    assert made(out, *words) == 1
    assert said in capsys.readouterr().err
    assert out.read_bytes() == before
    assert made(out, *words, "--force") == 0
    assert out.read_bytes() != before
    assert not out.with_name("configs.jsonl.part").exists()


def test_a_file_with_other_content_is_not_overwritten(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out.write_text("dear diary\n")
    assert made(out, "--count", "1") == 1
    assert "is there already, and holds no configs" in capsys.readouterr().err
    assert out.read_text() == "dear diary\n"


def test_footprints_that_the_ranges_cannot_reach_are_counted(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sample in, narrow networks: none takes tens of GiB."""
    ranges = out.with_name("ranges.toml")
    ranges.write_text(
        "[mlp]\nbatch = [1, 2]\nwidths = [8, 16]\n[mlp.footprint]\nlog = 0.0\nlow = 0.0\nhigh = 1.0\n"
        "high_mib = [40_000, 60_000]\n"
    )
    assert made(out, "--count", "3", "--ranges", str(ranges)) == 0
    said = capsys.readouterr()
    assert "3 configs in" in said.out
    assert "3 of 3 mlp configs are not within a factor of 1.4 of the footprint" in said.err


def test_what_is_near_enough_is_reached(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near, far = config("a", guess_mib=1400), config("b", guess_mib=1450)
    assert [Aimed(one, 1000.0, 0.0).is_reached for one in (near, far)] == [True, False]
    assert [Aimed(one, 2000.0, 0.0).is_reached for one in (near, far)] == [False, True]
    assert made(out, "--count", "2") == 0
    assert "factor" not in capsys.readouterr().err


def test_the_config_on_the_page_is_the_first_that_the_command_makes(out: Path) -> None:
    (shown,) = (block.text for block in blocks(PAGE.read_text(encoding="utf-8")) if '"mlp-0-000000"' in block.text)
    assert made(out, "--count", "2") == 0
    assert json.loads(shown) == json.loads(out.read_text().splitlines()[0])
    assert list(read_configs(out)) == generated("mlp", 2, 0, load_ranges())


def test_configs_go_to_standard_output_and_the_rest_to_the_other(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made(out, "--count", "2") == 0
    capsys.readouterr()
    monkeypatch.chdir(out.parent)
    assert made(Path("-"), "--count", "2") == 0
    said = capsys.readouterr()
    assert said.out == out.read_text()
    assert "2 configs" in said.err
    assert [path.name for path in out.parent.iterdir()] == ["configs.jsonl"]


def test_a_link_is_written_through(out: Path) -> None:
    """/dev/stdout is one, to a file where a shell sends the output there: as root it would be replaced."""
    link = out.with_name("link")
    out.touch()
    link.symlink_to(out)
    assert made(link, "--count", "2", "--force") == 0
    assert link.is_symlink()
    assert len(out.read_text().splitlines()) == 2


def test_no_family_is_a_mistake(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(out, "--families", "") == 2
    assert "is not one of mlp, cnn, transformer" in capsys.readouterr().err
    assert not out.exists()


def test_a_missing_file_of_ranges_is_an_error(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(out, "--ranges", str(out.with_name("none.toml"))) == 2
    assert "none.toml cannot be read: No such file or directory\n" in capsys.readouterr().err
