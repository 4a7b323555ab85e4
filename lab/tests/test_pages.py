"""What the pages say about themselves and the program: links, verbs, flags, settings, policies, commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from carma.cli import ALIASES, VERBS, carma
from carma.config import catalogue, load_settings
from carma.config.catalogue import sections
from carma.paths import find_paths
from carma.plugins import POLICIES, names
from carma.traces import parse
from carma.traces.schema import COLUMNS
from carma_lab.runs.figures import Figures
from tests.docs.markdown import ROOT, anchors, blocks, documents, links, name_of
from tools.pages_settings import toml

PAGES = documents()
# Modules and files, not settings.
PACKAGE_WORDS = ("core.", "daemon.pid", "daemon.log", "daemon.json", "sharing.json")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_no_page_refers_to_the_other_project_with_the_same_name(file: Path) -> None:
    """On the public index `carma` is another project: extras are installed from a checkout."""
    assert not re.search(r"pip install (-\S+ )*['\"]?carma\b", " ".join(_text(file).split()))


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_links_lead_somewhere(file: Path) -> None:
    for link in links(_text(file)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (file.parent / name).resolve() if name else file
        assert target.exists(), f"{link} leads to nothing"
        assert target.is_relative_to(ROOT), f"{link} leads out of the project"
        if anchor:
            assert anchor in anchors(_text(target)), f"{link}: there is no such heading"


def test_the_table_of_guarantees_names_every_file_of_attacks() -> None:
    table = _text(ROOT / "CONTRIBUTING.md").partition("| [guarantee]")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(test_\w+\.py)`", table))
    assert named == {file.name for file in (ROOT / "tests" / "multiuser").glob("test_*.py")}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        file = waiting.pop()
        if file in reached or file.suffix != ".md":
            continue
        reached.add(file)
        local = [link.partition("#")[0] for link in links(_text(file)) if "://" not in link]
        waiting += [(file.parent / name).resolve() for name in local if name]
    assert set(PAGES) <= reached


def _commands(file: Path) -> Iterator[list[str]]:
    """Every `carma ...` in a fenced block, up to a `--` (then come the task's own words), a `$`, a `|` or a remark."""
    for block in blocks(_text(file)):
        if block.info in ("", "console", "console no-run"):
            for line in block.text.replace("\\\n", " ").splitlines():
                line = line.removeprefix("$ ")
                if line.startswith("carma ") and not line.startswith("carma 0."):
                    words = re.split(r"   | # |[|$]", line)[0].split()
                    yield words[: words.index("--")] if "--" in words else words


def _flags(command: click.Command) -> set[str]:
    found = {"-h", "--help"}
    for parameter in command.params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def _inner(words: list[str]) -> click.Command:
    context = click.Context(carma, info_name="carma")
    command = carma.get_command(context, words[1])
    assert command is not None, f"carma {words[1]}: there is no such verb"
    if isinstance(command, click.Group) and len(words) > 2:
        inner = command.get_command(context, words[2])
        assert inner is not None, f"carma {words[1]} has no {words[2]}"
        return inner
    return command


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_commands_use_verbs_and_flags_that_exist(file: Path) -> None:
    for words in _commands(file):
        if len(words) < 2 or words[1].startswith("-"):
            continue
        known = _flags(_inner(words))
        for word in words[2:]:
            if word.startswith("-"):
                assert word.split("=")[0] in known, f"{shlex.join(words)}: there is no flag {word}"


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_settings_that_are_named_exist(file: Path) -> None:
    text = _text(file)
    # A name of three parts is a figure's.
    for section, key in re.findall(rf"`({'|'.join(sections())})\.([a-z_]+)\b(?![/(]|\.[a-z])", text):
        if not f"{section}.{key}".startswith(PACKAGE_WORDS):
            assert f"{section}.{key}" in catalogue(), f"there is no setting {section}.{key}"
    for name in re.findall(r"--set ([\w.]+)=", text):
        of_the_example = file.name == "plugins.md" and name.partition(".")[0] not in sections()
        assert of_the_example or name in catalogue(), f"there is no setting {name}"


@pytest.mark.parametrize("file", PAGES, ids=name_of)
def test_settings_files_that_are_shown_can_be_used(file: Path, tmp_path: Path) -> None:
    paths = find_paths({"CARMA_HOME": str(tmp_path)})
    for block in blocks(_text(file)):
        if block.info == "toml" and "entry-points" not in block.text:
            paths.config_file.write_text(block.text)
            load_settings(paths, {})


def test_the_readmes_two_commands_are_those_of_the_ci_script() -> None:
    readme = _text(ROOT / "README.md").splitlines()
    demo = "    python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/carma demo"
    tests = "    python3 -m venv .venv && .venv/bin/pip install '.[dev]' './gpumemnet[train]' ./lab && .venv/bin/pytest"
    assert demo in readme
    assert tests in readme
    script = _text(ROOT / ".ci" / "run").replace(" --quiet --disable-pip-version-check", "")
    assert tests.strip() in script


def test_the_table_of_policies_is_complete() -> None:
    table = _text(ROOT / "docs" / "decisions.md").partition("| policy |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `([a-z-]+)`[^|]*\|", table, re.MULTILINE)
    assert sorted(listed) == sorted(names(POLICIES))


def test_every_figure_of_a_simulation_is_in_the_table() -> None:
    text = _text(ROOT / "docs" / "simulation.md")
    rows = text.split("## Figures", 1)[1].split("## ", 1)[0].splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(Figures.__struct_fields__)


def test_the_trace_format_is_the_readers() -> None:
    page = _text(ROOT / "docs" / "traces.md")
    assert tuple(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == tuple(column.name for column in COLUMNS)
    (example,) = [block.text for block in blocks(page) if block.info == "csv"]
    assert [task.name for task in parse(example.splitlines(), "example.csv").tasks] == ["resnet", "bert", "gpt2"]


def test_every_alias_stands_for_a_verb_that_exists() -> None:
    assert set(ALIASES.values()) <= set(VERBS)


def test_defaults_that_are_spelled_out_in_the_settings_page_can_be_read_back() -> None:
    """The page's `default` column is TOML: pasted into a file it gives the default again."""
    for setting in catalogue().values():
        value = tomllib.loads(f"value = {toml(setting.default)}")["value"]
        assert msgspec.convert(value, setting.annotation) == setting.default
