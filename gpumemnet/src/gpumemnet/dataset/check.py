"""Checks a data-set file for values that are impossible or contradict each other. An error names the row and the
column; nothing is corrected."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from carma.errors import Usage
from gpumemnet.dataset.schema import ACTIVITY, CONFIG_COLUMNS, MEMORY
from gpumemnet.dataset.table import HINT, Edges, Layers, Table

LARGEST_MIB = 2.0**21  # 2 TiB: more than any GPU has, so a larger figure is probably in bytes
_SHARE_COLUMNS = tuple(column.name for column in ACTIVITY if column.unit == "0 to 1")
_MEMORY_COLUMNS = tuple(column.name for column in MEMORY if column.unit == "MiB")


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

    def _raise(self, row: int, column: str, why: str) -> NoReturn:
        raise Usage(f"{self.path}: row {self.table.ids[row]}, column {column}: {why}", HINT)

    def _raise_if_any(self, wrong: NDArray[np.bool_], column: str, why: str) -> None:
        """Raises an error about the first wrong row; `{}` in `why` is replaced by its value."""
        if wrong.any():
            row = int(wrong.argmax())
            self._raise(row, column, why.format(self.table[column][row] if column in self.table.columns else ""))

    def ids(self) -> None:
        ids = np.array(self.table.ids)
        repeated = np.ones(len(ids), bool)
        repeated[np.unique(ids, return_index=True)[1]] = False
        self._raise_if_any(repeated, "id", "another row has the same id")

    def settings(self) -> None:
        """Columns that repeat a field of the config, id and family among them."""
        for name in CONFIG_COLUMNS:
            column = self.table.columns.get(name, self.table.settings.get(name, ()))
            for row, (value, config) in enumerate(zip(column, self.table.configs, strict=True)):
                if value != getattr(config, name):
                    self._raise(row, name, f"{value} differs from the config, which has {getattr(config, name)}")

    def memory(self) -> None:
        table = self.table
        measured = table["oom"] == 0
        for name in _MEMORY_COLUMNS:
            known = ~np.isnan(table[name])
            self._raise_if_any(measured & ~known, name, "the value is missing, but the run did not run out of memory")
            self._raise_if_any(
                known & ~((table[name] >= 0) & (table[name] < LARGEST_MIB)), name, "{} is not a size in MiB"
            )
        allocated, reserved, footprint = (table[f"{name}_mib"] for name in ("allocated", "reserved", "footprint"))
        self._raise_if_any(measured & ~(allocated > 0), "allocated_mib", "{} is not above 0")
        self._raise_if_any(measured & ~(reserved >= allocated), "reserved_mib", "{} is less than allocated_mib")
        self._raise_if_any(measured & ~(footprint >= reserved), "footprint_mib", "{} is less than reserved_mib")
        more = measured & ~(table["requested_mib"] <= allocated)
        self._raise_if_any(more, "requested_mib", "{} is more than allocated_mib")

    def activity(self) -> None:
        for name in _SHARE_COLUMNS:
            column = self.table[name]
            self._raise_if_any(~np.isnan(column) & ~((column >= 0) & (column <= 1)), name, "{} is not between 0 and 1")
        for name in ("step_ms", "power_w"):
            column = self.table[name]
            self._raise_if_any(~np.isnan(column) & ~((column > 0) & np.isfinite(column)), name, "{} is not possible")

    def layers(self, layers: Layers) -> None:
        count = len(layers.parameters)
        for name in ("kind", "output", "input", "attributes", "inplace"):
            if (length := len(getattr(layers, name))) != count:
                raise Usage(f"{self.path}: column layer_{name} has {length} layers, layer_parameters has {count}", HINT)
        self._raise_if_any(np.diff(layers.offsets) == 0, "layer_kind", "the run has no layers")
        running = np.concatenate([[0], np.cumsum(layers.parameters)])
        sums = running[layers.offsets[1:]] - running[layers.offsets[:-1]]
        wanted = self.table["parameters"] + self.table["tied_parameters"] - self.table["inside_parameters"]
        self._raise_if_any(
            sums != wanted, "layer_parameters", "the sum is not parameters + tied_parameters - inside_parameters"
        )

    def edges(self, edges: Edges) -> None:
        """An edge leads from a layer to a later one of the same row."""
        if len(edges.source) != len(edges.target):
            raise Usage(f"{self.path}: columns edge_from and edge_to differ in length", HINT)
        rows = np.repeat(np.arange(len(self.table)), np.diff(edges.offsets))
        layers = np.diff(self.table.layers.offsets)[rows]
        bad = (edges.source < 0) | (edges.source >= edges.target) | (edges.target >= layers)
        for edge in np.flatnonzero(bad)[:1]:
            what = f"an edge from {edges.source[edge]} to {edges.target[edge]}"
            self._raise(int(rows[edge]), "edge_to", f"{what} is not possible with {layers[edge]} layers")
