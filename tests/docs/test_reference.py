"""The reference is the program's: made from it, up to date, and complete."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from carma.cli import VERBS, carma
from carma.config import catalogue
from carma.errors import every
from carma.wire.routes import API, ROUTES
from tools import reference


def _page(name: str) -> str:
    return (reference.REFERENCE / name).read_text(encoding="utf-8")


def test_the_reference_is_up_to_date() -> None:
    assert reference.stale() == [], "make it again: python -m tools.reference"


def test_every_verb_setting_route_and_error_is_in_it() -> None:
    assert all(f"### carma {verb}\n" in _page("cli.md") for verb in VERBS)
    groups = {verb: carma.get_command(click.Context(carma), verb) for verb in VERBS}
    for verb, group in groups.items():
        if isinstance(group, click.Group):
            inner = group.list_commands(click.Context(group))
            assert all(f"#### carma {verb} {name}\n" in _page("cli.md") for name in inner)
    assert all(f"| `{name}` |" in _page("settings.md") for name in catalogue())
    assert all(f"`{route.method} {API}{route.path}`" in _page("api.md") for route in ROUTES)
    assert all(f"| `{kind.code}` |" in _page("errors.md") for kind in every() if kind.__module__ == "carma.errors")


def test_a_stale_page_is_noticed_with_its_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.write(tmp_path)
    assert reference.stale(tmp_path) == []
    page = tmp_path / "errors.md"
    page.write_text(page.read_text(encoding="utf-8").replace("`busy`", "`bsy`"), encoding="utf-8")
    (tmp_path / "old.md").write_text("of a page that is no longer made")
    (tmp_path / "cli.md").unlink()
    monkeypatch.setattr(reference.stale, "__defaults__", (tmp_path,))
    assert reference.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "errors.md is not up to date" in said
    assert "`bsy`" in said
    assert "cli.md is not there" in said
    assert "old.md is not made by this program" in said
