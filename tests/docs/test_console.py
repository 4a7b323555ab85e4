"""The commands in the documentation are real, and print what it says they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import Terminal, matches, steps
from tests.docs.markdown import Block, blocks, documents, name_of
from tests.harness import Daemon, new_home


def _files(text: str) -> dict[str, str]:
    """Blocks that are files, by name: the second word after the fence (```sh train.sh)."""
    named = [(block.info.split(), block.text) for block in blocks(text) if not block.info.startswith("console")]
    return {words[1]: f"{text}\n" for words, text in named if len(words) == 2}


def _to_run(file: Path) -> list[Block]:
    return [block for block in blocks(file.read_text(encoding="utf-8")) if block.info == "console"]


@pytest.mark.parametrize("file", [file for file in documents() if _to_run(file)], ids=name_of)
def test_the_commands_of_a_page_print_what_it_says(file: Path) -> None:
    """One daemon a page: the page's own `carma up`, or one that is there from the beginning."""
    todo = [step for block in _to_run(file) for step in steps(block)]
    with new_home() as home:
        daemon = Daemon(home, gpus=2)
        terminal = Terminal(home)
        for name, text in _files(file.read_text(encoding="utf-8")).items():
            (terminal.directory / name).write_text(text, encoding="utf-8")
        try:
            if "--detach" not in todo[0].command:
                daemon.start()
            for step in todo:
                terminal.check(step)
        finally:
            daemon.clean()


def test_a_console_block_is_run_or_says_that_it_is_not() -> None:
    for file in documents():
        for block in blocks(file.read_text(encoding="utf-8")):
            if block.info.startswith("console"):
                assert block.info in ("console", "console no-run"), f"{file}:{block.line}"
                assert any(step.command.startswith("carma") for step in steps(block)), f"{file}:{block.line}"


@pytest.mark.parametrize(
    ("output", "documented", "same"),
    [
        ("submitted task 1\n", "submitted task 1\n", True),
        ("submitted task 2\n", "submitted task 1\n", False),
        ("started at 08:52:02, 2 s ago\n", "started at 17:00:00, 31 s ago\n", True),
        ("asked to save; it has 02:00\n", "asked to save; it has 120 s\n", False),
        ("asked to save; it has 02:00\n", "asked to save; it has 02:00\n", True),
        ("a long line\nthat was folded\n", "a long\nline that was folded\n", True),
        ("one\ntwo\nthree\n", "one\n…\nthree\n", True),
        ("one\ntwo\nthree\n", "one\n...\n", True),
        ("one\ntwo\n", "two\n…\n", False),
        ("one\ntwo\n", "", False),
    ],
)
def test_output_is_compared_but_for_what_always_differs(output: str, documented: str, same: bool) -> None:
    assert matches(output, documented) is same


def test_a_command_may_go_on_in_the_next_line() -> None:
    (first, second) = steps(Block(1, "console", "$ carma submit \\\n    -- true\nsubmitted task 1\n$ carma queue\n"))
    assert first.command.split() == ["carma", "submit", "\\", "--", "true"]
    assert first.output == "submitted task 1\n"
    assert (second.command, second.output, second.looks, first.looks) == ("carma queue", "", True, False)
