"""The modules of the core import each other in one direction, imports for type checking included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import carma.core

FOLDER = Path(carma.core.__file__).parent
MODULES = {
    ".".join(("carma.core", *file.relative_to(FOLDER).with_suffix("").parts)): file for file in FOLDER.rglob("*.py")
}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_module_of_the_core_imports_itself_through_others() -> None:
    graph = {module: {name for name in imported(file) if name in MODULES} for module, file in MODULES.items()}
    assert sum(len(names) for names in graph.values()) > len(MODULES)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)
