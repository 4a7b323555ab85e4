"""paper.json: one entry for each part, with when, where and by which command it was made; the claims over all of them.

A part that is made again takes the place of the old one; the others stay as they are. A file of another size of the
study (--quick) is not mixed with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import carma
import carma_lab
from carma.errors import Usage
from carma_lab.bench.machine import facts
from carma_lab.bench.paper.claims import claims
from carma_lab.bench.paper.published import SOURCE
from carma_lab.bench.paper.variants import PARTS, Scope
from carma_lab.bench.results_file import rounded
from gpumemnet.directories import write_whole

NAME = "paper.json"
FORMAT = 1
DECIDES = ("carma/core", "carma/estimate", "carma/traces", "carma_lab/simulator", "carma_lab/traces")


def code() -> str:
    """Digest of the code that decides and simulates, as it is on the disk now. Parts with different digests are not
    comparable, and a part during which it changed belongs to no version."""
    roots = {"carma": Path(carma.__file__).parents[1], "carma_lab": Path(carma_lab.__file__).parents[1]}
    digest = hashlib.sha256()
    for folder in DECIDES:
        root = roots[folder.split("/")[0]]
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in (".py", ".csv")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def about(scope: Scope, command: str, took_s: float, before: str) -> dict[str, Any]:
    """Facts about one part; `before` is the digest of the code when the part began."""
    machine = msgspec.to_builtins(facts())
    made = {"command": command, "seed": scope.seed, "gpu": "a100-40, simulated", "took_s": round(took_s, 1)}
    return {**made, "code": before, "code_changed": code() != before, **machine}


def read(out: Path) -> dict[str, Any]:
    """What is there; nothing where there is no file."""
    path = out / NAME
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "format" not in found:
            raise ValueError("it tells no format")
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']}, not {FORMAT}")
    except ValueError as error:
        raise Usage(f"{path} is no file of this study: {error}", "Move it away, or give another --out.") from error
    return found


def merged(old: Mapping[str, Any], part: str, made: Mapping[str, Any], scope: Scope) -> dict[str, Any]:
    """The file with that part in place of the old one."""
    kept = old.get("parts", {}) if old.get("quick", scope.quick) == scope.quick else {}
    parts = {name: made if name == part else kept[name] for name in PARTS if name == part or name in kept}
    return judged({"format": FORMAT, "quick": scope.quick, "published": SOURCE, "parts": rounded(parts)})


def judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """The file with its claims calculated again from its parts and put before them."""
    head = {name: value for name, value in found.items() if name not in ("claims", "parts")}
    return {**head, "claims": msgspec.to_builtins(claims(found["parts"])), "parts": found["parts"]}


def write(out: Path, found: Mapping[str, Any]) -> Path:
    path = out / NAME
    write_whole(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    return path
