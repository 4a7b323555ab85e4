"""Checks whether a data-set file can be true. An error names its row and column; nothing is corrected."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from carma.errors import Usage
from gpumemnet.dataset.schema import ACTIVITY, CONFIG_COLUMNS, MEMORY
from gpumemnet.dataset.table import HINT, Edges, Layers, Table

LARGEST_MIB = 2.0**21  # 2 TiB: more than any GPU has, so the figure would be in bytes
_SHARES = tuple(column.name for column in ACTIVITY if column.unit == "0 to 1")
_FIGURES = tuple(column.name for column in MEMORY if column.unit == "MiB")


def check(table: Table, path: Path) -> None:
    checking = _Checking(table, path)
    checking.ids()
    checking.settings()
    checking.memory()
    checking.activity()
    checking.layers(table.layers)
    checking.edges(table.edges)


class _Checking(NamedTuple):
    table: Table
    path: Path

    def _refuse(self, row: int, column: str, why: str) -> NoReturn:
        raise Usage(f"{self.path}: row {self.table.ids[row]}, column {column}: {why}", HINT)

    def _none(self, wrong: NDArray[np.bool_], column: str, why: str) -> None:
        """Refuses the first wrong row; `{}` in the sentence is its value."""
        if wrong.any():
            row = int(wrong.argmax())
            self._refuse(row, column, why.format(self.table[column][row] if column in self.table.columns else ""))

    def ids(self) -> None:
        ids = np.array(self.table.ids)
        again = np.ones(len(ids), bool)
        again[np.unique(ids, return_index=True)[1]] = False
        self._none(again, "id", "it is there twice")

    def settings(self) -> None:
        """Columns that repeat a field of the config, id and family among them."""
        for name in CONFIG_COLUMNS:
            column = self.table.columns.get(name, self.table.settings.get(name, ()))
            for row, (told, config) in enumerate(zip(column, self.table.configs, strict=True)):
                if told != getattr(config, name):
                    self._refuse(row, name, f"{told} is not what the config says, {getattr(config, name)}")

    def memory(self) -> None:
        table = self.table
        measured = table["oom"] == 0
        for name in _FIGURES:
            known = ~np.isnan(table[name])
            self._none(measured & ~known, name, "it is missing, though the run did not run out of memory")
            self._none(known & ~((table[name] >= 0) & (table[name] < LARGEST_MIB)), name, "{} is no figure in MiB")
        allocated, reserved, footprint = (table[f"{name}_mib"] for name in ("allocated", "reserved", "footprint"))
        self._none(measured & ~(allocated > 0), "allocated_mib", "{} is not above 0")
        self._none(measured & ~(reserved >= allocated), "reserved_mib", "{} is less than what was allocated")
        self._none(measured & ~(footprint >= reserved), "footprint_mib", "{} is less than what was reserved")
        more = measured & ~(table["requested_mib"] <= allocated)
        self._none(more, "requested_mib", "{} is more than what was allocated")

    def activity(self) -> None:
        for name in _SHARES:
            column = self.table[name]
            self._none(~np.isnan(column) & ~((column >= 0) & (column <= 1)), name, "{} is no share between 0 and 1")
        for name in ("step_ms", "power_w"):
            column = self.table[name]
            self._none(~np.isnan(column) & ~((column > 0) & np.isfinite(column)), name, "{} is not possible")

    def layers(self, layers: Layers) -> None:
        count = len(layers.parameters)
        for name in ("kind", "output", "input", "attributes", "inplace"):
            if (length := len(getattr(layers, name))) != count:
                raise Usage(f"{self.path}: column layer_{name} has {length} layers, layer_parameters has {count}", HINT)
        self._none(np.diff(layers.offsets) == 0, "layer_kind", "there is no layer")
        running = np.concatenate([[0], np.cumsum(layers.parameters)])
        sums = running[layers.offsets[1:]] - running[layers.offsets[:-1]]
        wanted = self.table["parameters"] + self.table["tied_parameters"] - self.table["inside_parameters"]
        self._none(sums != wanted, "layer_parameters", "their sum is not the model's, with what is tied and inside")

    def edges(self, edges: Edges) -> None:
        """An edge leads from a layer to a later one of the same row."""
        if len(edges.source) != len(edges.target):
            raise Usage(f"{self.path}: columns edge_from and edge_to are not equally long", HINT)
        rows = np.repeat(np.arange(len(self.table)), np.diff(edges.offsets))
        layers = np.diff(self.table.layers.offsets)[rows]
        bad = (edges.source < 0) | (edges.source >= edges.target) | (edges.target >= layers)
        for edge in np.flatnonzero(bad)[:1]:
            what = f"an edge from {edges.source[edge]} to {edges.target[edge]}"
            self._refuse(int(rows[edge]), "edge_to", f"{what} is not possible with {layers[edge]} layers")
