"""`carma train --install`: models go to where estimates look first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from carma.cli import main
from gpumemnet.serving.model import folders

pytest.importorskip("sklearn")
pytest.importorskip("torch")

if TYPE_CHECKING:
    from gpumemnet.training import main as run


def test_models_go_to_the_users_own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpumemnet.training import main as run

    given: list[run.Options] = []

    def learn(options: run.Options, _tell: object) -> run.Done:
        given.append(options)
        return run.Done(models=(), entries=())

    monkeypatch.setattr(run, "run", learn)
    environ = {"HOME": str(tmp_path)}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CARMA_HOME", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    main(["train", "x.parquet", "--install"])
    assert Path(given[0].out) == folders(environ)[0] == tmp_path / ".local/share/carma/gpumemnet"


def test_two_places_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "x.parquet", "--install", "--out", "models"]) == 2
    assert "--install and --out exclude each other" in capsys.readouterr().err
