"""Lines of code for each distribution and package: `python -m tools.count_lines`.

Blank lines, comments and docstrings do not count. Also printed: files above 400 lines, files below 60 lines, and
functions above 30 lines, all of source code without tests.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCES = {
    "product": Path("src/carma"),
    "gpumemnet": Path("gpumemnet/src/gpumemnet"),
    "lab": Path("lab/src/carma_lab"),
}
BESIDES = {
    "tools": (Path("tools"), Path("lab/tools")),
    "tests": (Path("tests"), Path("gpumemnet/tests"), Path("lab/tests")),
}
LONG_FILE, SHORT_FILE, LONG_FUNCTION = 400, 60, 30
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def long_functions(text: str) -> int:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return sum((node.end_lineno or 0) - node.lineno + 1 > LONG_FUNCTION for node in nodes)


def main() -> None:
    files = {file: file.read_text(encoding="utf-8") for root in SOURCES.values() for file in sorted(root.rglob("*.py"))}
    total = 0
    for name, root in SOURCES.items():
        packages: Counter[str] = Counter()
        for file, text in files.items():
            if file.is_relative_to(root):
                parts = file.relative_to(root).parts
                packages[parts[0] if len(parts) > 1 else "(top level)"] += code_lines(text)
        total += packages.total()
        print(f"{name:<12} {packages.total():>6,}")
        for package, count in packages.most_common():
            print(f"  {package:<12} {count:>6,}")
    print(f"{'all three':<12} {total:>6,}")
    for name, roots in BESIDES.items():
        found = sum(code_lines(file.read_text(encoding="utf-8")) for root in roots for file in root.rglob("*.py"))
        print(f"{name:<12} {found:>6,}")
    lengths = {file: text.count("\n") for file, text in files.items()}
    print(f"files                       {len(files)}")
    print(f"files above {LONG_FILE} lines       {sum(length > LONG_FILE for length in lengths.values())}")
    print(f"files below {SHORT_FILE} lines        {sum(length < SHORT_FILE for length in lengths.values())}")
    print(f"functions above {LONG_FUNCTION} lines    {sum(map(long_functions, files.values()))}")


if __name__ == "__main__":
    main()
