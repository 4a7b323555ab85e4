"""Size and installation of the program at several revisions, for lab/results/structure/README.md.

    python -m lab.tools.structure 3796e707 3cee1219 HEAD > lab/results/structure/structure.json

For each revision: lines of code (as tools/count_lines.py counts them), long functions, and three runs of `pip install`
of the product into a fresh virtual environment, with the load of the machine at their start. It works on copies in a
temporary directory.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from carma_lab.bench.machine import facts
from tools.count_lines import SOURCES, code_lines, long_functions

INSTALLS = 3
MIB = 2**20


def copy_of(revision: str, folder: Path) -> Path:
    copy = folder / revision
    copy.mkdir()
    archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(copy)], input=archive, check=True)
    return copy


def lines_of(copy: Path) -> dict[str, Any]:
    """Lines by distribution and, for the product, by package. Before 0.3.0 there was one distribution."""
    texts = {
        path: path.read_text(encoding="utf-8") for root in SOURCES.values() for path in (copy / root).rglob("*.py")
    }
    packages: Counter[str] = Counter()
    totals: dict[str, int] = {}
    for name, root in SOURCES.items():
        own = {path: code_lines(text) for path, text in texts.items() if path.is_relative_to(copy / root)}
        totals[name] = sum(own.values())
        for path, count in own.items() if name == "product" else ():
            parts = path.relative_to(copy / root).parts
            packages[parts[0] if len(parts) > 1 else "(top level)"] += count
    return {
        "lines": {**totals, "all": sum(totals.values())},
        "packages": dict(packages.most_common()),
        "files": len(texts),
        "functions_above_30_lines": sum(map(long_functions, texts.values())),
    }


def install(copy: Path, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        environment = Path(place, "venv")
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        before, load = size_mib(environment), os.getloadavg()[0]
        began, used_s = time.monotonic(), children_s()
        pip = str(environment / "bin" / "pip")
        subprocess.run([pip, "install", "--quiet", str(copy)], check=True, stdout=sys.stderr)
        took_s, cpu_s = time.monotonic() - began, children_s() - used_s
        frozen = subprocess.run([pip, "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
        packages = [line for line in frozen.split() if line.partition("==")[0] not in ("pip", "setuptools", "wheel")]
        return {
            "load": round(load, 1),
            "seconds": round(took_s, 1),
            "cpu_seconds": round(cpu_s, 1),
            "mib": round(size_mib(environment) - before),
            "packages": packages,
        }


def children_s() -> float:
    """Processor time of ended child processes. Unlike the seconds on the clock it hardly depends on other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def size_mib(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) / MIB


def main() -> None:
    revisions = sys.argv[1:]
    found: dict[str, Any] = {
        "command": " ".join(("python -m lab.tools.structure", *revisions)),
        "machine": msgspec.to_builtins(facts()),
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        copies = {revision: copy_of(revision, folder) for revision in revisions}
        found["revisions"] = {
            revision: {**described(revision), **lines_of(copy), "installs": []} for revision, copy in copies.items()
        }
        for _ in range(INSTALLS):
            for revision, copy in copies.items():
                found["revisions"][revision]["installs"].append(install(copy, folder))
    print(json.dumps(found, indent=1))


def described(revision: str) -> dict[str, str]:
    words = subprocess.run(
        ["git", "log", "-1", "--format=%H%n%cs%n%s", revision], check=True, capture_output=True, text=True
    )
    commit, date, subject = words.stdout.splitlines()
    return {"commit": commit, "date": date, "subject": subject}


if __name__ == "__main__":
    main()
