"""Every file of lab/results names the command that makes it again, and every such command still parses."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from carma.cli import carma

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "lab" / "results"
FILES = sorted(path.relative_to(RESULTS) for path in RESULTS.rglob("*") if path.is_file())
COMMAND = re.compile(r"(?:carma (?:bench|simulate|train|calibrate|trace|demo|compare)\b|python (?:-m )?\S+)[^`|]*")
# Published facts, restated by hand from the source that the file names in its first lines.
RESTATED = ("a100/solo.csv",)


def named_commands(value: Any) -> Iterator[str]:
    """Of a decoded JSON file: every text under the key `command`. One text may hold several, with remarks."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "command" and isinstance(inner, str):
                yield from (re.sub(r"\(.*?\)", "", part).strip() for part in inner.split(";"))
            else:
                yield from named_commands(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named_commands(inner)


def page_commands(page: Path) -> list[str]:
    """Every command of a README, in back-quotes or in an indented line."""
    text = page.read_text(encoding="utf-8")
    found = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
    found += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    return [command for command in found if COMMAND.fullmatch(command)]


def data_of(file: Path) -> Path | None:
    """The JSON file itself; of a picture the one that it shows, whose name its own begins with."""
    if file.suffix in (".png", ".svg"):
        shown = [other for other in FILES if other.suffix == ".json" and other.parent == file.parent]
        return next((other for other in shown if f"{file.stem}-".startswith(f"{other.stem}-")), None)
    return file if file.suffix == ".json" else None


def commands_of(file: Path) -> list[str]:
    """Of its data where these name any, else of the README that mentions it."""
    data = data_of(file)
    if data is not None:
        own = list(dict.fromkeys(named_commands(json.loads((RESULTS / data).read_text(encoding="utf-8")))))
        if own:
            return own
    for folder in (file.parent, *file.parent.parents):
        page = RESULTS / folder / "README.md"
        if page.exists():
            names = re.findall(r"[\w*.-]+\.\w+|\.\w+", page.read_text(encoding="utf-8"))
            drawn = f"{file.stem}.png" if file.suffix == ".svg" else file.name
            if file.name == "README.md" or any(fnmatch.fnmatch(drawn, name) for name in names):
                return page_commands(page)
    return []


@pytest.mark.parametrize("file", [file for file in FILES if str(file) not in RESTATED], ids=str)
def test_a_result_names_the_command_that_makes_it_again(file: Path) -> None:
    assert commands_of(file)


ALL = sorted({command for file in FILES for command in commands_of(file)})


@pytest.mark.parametrize("command", ALL)
def test_a_command_of_a_result_still_parses(command: str) -> None:
    words = shlex.split(command.partition(" > ")[0])
    if words[0] == "carma":
        parse_verb(words[1:])
    else:
        check_options(words[1:])


def parse_verb(words: list[str]) -> None:
    context = click.Context(carma, info_name="carma")
    verb: click.Command = carma
    while isinstance(verb, click.Group):
        inner = verb.get_command(context, words[0])
        assert inner is not None, f"there is no verb {words[0]}"
        verb, words = inner, words[1:]
    if words:
        verb.make_context(verb.name, words, parent=context)


def check_options(words: list[str]) -> None:
    """Of `-m MODULE ...` or `FILE ...`: it is a program, and the text of its package has each option."""
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None, f"there is no module {words[1]}"
        assert spec.origin is not None
        file = Path(spec.origin)
    else:
        file = ROOT / words[0]
    text = file.read_text(encoding="utf-8")
    assert '__name__ == "__main__"' in text, f"{file} is no program"
    shared = re.findall(r"from lab\.tools(?:\.(\w+))? import (\w+)", text)
    texts = text + "".join(
        (ROOT / "lab" / "tools" / f"{one or two}.py").read_text(encoding="utf-8") for one, two in shared
    )
    if file.name == "main.py":  # it loads the package beside it
        texts += "".join(module.read_text(encoding="utf-8") for module in file.parent.rglob("*.py"))
    for option in (word for word in words if word.startswith("--")):
        assert f'"{option}"' in texts, f"{file.name} has no option {option}"
