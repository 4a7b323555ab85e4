"""Replays a trial with a model of cuDNN's workspaces that never saw the run's family.

The shipped model (`trial/data/`) is learnt from the measured runs too. So an estimate of one of these runs that goes
by it says nothing of a family that nobody measured. For that, models are fitted without some families each
(`python -m lab.tools.fit_workspaces … --without run:resnet … --out DIR/0.conv.json.gz`), and DIR/folds.json says which:
`{"0.conv.json.gz": ["resnet", "vgg"]}`.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path

import msgspec

from carma.errors import Usage
from carma.trial.replay.conv_workspaces import ConvModel, ConvWorkspaces

INDEX = "folds.json"


class Folds:
    """Which model was fitted without which families."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=dict[str, list[str]])
        except (OSError, msgspec.MsgspecError) as error:
            raise Usage(f"{folder / INDEX} cannot be used: {error}", "It names the families of each file.") from error
        self._file = {family: name for name, families in index.items() for family in families}
        for name in index:
            if not (folder / name).is_file():
                raise Usage(f"{folder / name} is not there", f"{INDEX} names it.")

    def name(self, family: str) -> str:
        """The file whose model does not know the family; "" where every model does."""
        return self._file.get(family, "")

    def workspaces(self, family: str) -> ConvWorkspaces | None:
        """The model that does not know the family; None where the family is in no fold."""
        name = self.name(family)
        return _workspaces(self._folder / name) if name else None


@lru_cache(maxsize=16)
def _workspaces(file: Path) -> ConvWorkspaces:
    return ConvWorkspaces(msgspec.json.decode(gzip.decompress(file.read_bytes()), type=ConvModel))
