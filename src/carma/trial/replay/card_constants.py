"""What a GPU and a framework allocate beside tensors, as measured: the context, workspaces, the table of calls.

A GPU has two files: `NAME.json` (Constants) and `NAME.rows.jsonl.gz` (one measured call a line, as
`inside/carma_measure` wrote it). `carma calibrate` makes them for a GPU of this server; some come with CARMA. Files of
this server take precedence. A GPU that was not measured gets the files of the most similar one, with a warning.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma.core.model.values import Record
from carma.paths import Paths, find_paths
from carma.trial.cards import card_for

FORMAT = 1
SHIPPED = Path(__file__).parent.parent / "data"
SYSTEM = Path("/var/lib/carma/cards")  # calibrations by root, for every user of the server
MIB = 1 << 20
MINORS_APART = 4  # of torch; closer versions allocate nearly the same, and the bound covers the difference

Row = dict[str, object]


class ContextReading(Record, frozen=True, kw_only=True):
    """Memory of a process outside its allocator after it had used a library."""

    after: str  # "init", "matmul_fp32", "conv_bf16", "attention" …: `inside/carma_measure/constants.py` has them all
    alone: bool = False  # in a process that used nothing else; otherwise after all contexts listed before it
    outside_bytes: int


class CardConstants(Record, frozen=True, kw_only=True):
    """Constants of one GPU under one framework version."""

    format: int = FORMAT
    gpu: str  # as its driver names it
    capability: tuple[int, int] | None = None
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    cudnn: str = ""
    python: str = ""
    date: str = ""
    contexts: tuple[ContextReading, ...] = ()
    kept_once: dict[str, int] = {}  # "mm_fp32_forward": bytes of a workspace that the first call allocates and keeps
    rows: int = 0  # number of lines of the other file

    def context_mib(self, used: Collection[str]) -> int:
        """Context of a process that used these libraries.

        Each library counts with what it added to a process that had used others before, so shared code counts with the
        first one. The sum may therefore be too small, but it is never less than any of them needed alone.
        """
        added: dict[str, int] = {}
        start = last = 0
        for reading in (reading for reading in self.contexts if not reading.alone):
            if reading.after == "init":
                start = reading.outside_bytes
            added[reading.after] = max(0, reading.outside_bytes - last)
            last = reading.outside_bytes
        together = start + sum(added.get(name, 0) for name in set(used) - {"init"})
        alone = [reading.outside_bytes for reading in self.contexts if reading.alone and reading.after in used]
        return -(-max([together, *alone]) // MIB)

    def blas_workspace_bytes(self) -> int | None:
        """Workspace that the first matrix product of a thread keeps; None if it was not measured."""
        products = re.compile(r"(mm|linear|bmm)_.*forward")
        return max((size for name, size in self.kept_once.items() if products.fullmatch(name)), default=None)


class ChosenConstants(NamedTuple):
    """The best constants, the file that holds them, and how they differ from what was asked for."""

    constants: CardConstants
    file: Path
    warnings: tuple[str, ...]


def load(gpu: str, torch: str, folders: Sequence[Path]) -> ChosenConstants | None:
    """The best constants for a GPU (by its driver's name) and a torch version; None if there are none at all."""
    ranked = [
        ((*_distance(gpu, constants.gpu), *_apart(torch, constants.torch), place), constants, file)
        for place, folder in enumerate(folders)
        for file, constants in _in(folder)
    ]
    if not ranked:
        return None
    _, constants, file = min(ranked, key=lambda each: each[0])
    return ChosenConstants(constants, file, tuple(_warnings(gpu, torch, constants)))


def folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Directories of these files for this user, in order of precedence."""
    return tuple(dict.fromkeys((own_folder(find_paths(environ)), SYSTEM, SHIPPED)))


def own_folder(paths: Paths) -> Path:
    """A user's data directory, or the state directory of a server or of CARMA_HOME."""
    return (paths.log_dir.parent if paths.layout == "user" else paths.state_dir) / "cards"


def save(constants: CardConstants, rows: Sequence[Row], file: Path) -> None:
    """Writes both files atomically; the constants last, because `load` looks for them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    _write(rows_file(file), gzip.compress(lines, mtime=0))
    _write(file, msgspec.json.format(msgspec.json.encode(constants), indent=1) + b"\n")


def rows_file(file: Path) -> Path:
    return file.with_name(f"{file.name.removesuffix('.json')}.rows.jsonl.gz")


def file_name(constants: CardConstants) -> str:
    """`nvidia-h200_torch-2.11.json`: one file for a GPU and a minor version of torch."""
    gpu = re.sub(r"[^a-z0-9.]+", "-", constants.gpu.lower()).strip("-")
    return f"{gpu}_torch-{'.'.join(str(part) for part in version_of(constants.torch))}.json"


def read_rows(file: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder(Row)
    with gzip.open(file) as lines:
        for line in lines:
            yield decoder.decode(line)


def _write(file: Path, data: bytes) -> None:
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(data)
    part.replace(file)


def _in(folder: Path) -> Iterator[tuple[Path, CardConstants]]:
    """All readable constants; files of another format and broken files are ignored."""
    try:
        files = sorted(folder.glob("*.json"))
    except OSError:
        return
    for file in files:
        try:
            constants = msgspec.json.decode(file.read_bytes(), type=CardConstants)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if constants.format == FORMAT and constants.contexts:
            yield file, constants


def _distance(wanted: str, measured: str) -> tuple[int, ...]:
    """Same name, same model, then by generation and size; unknown GPUs come last."""
    if wanted.casefold() == measured.casefold():
        return (0, 0, 0)
    one, other = card_for(wanted), card_for(measured)
    if one is None or other is None:
        return (9, 0, 0)
    if one is other:
        return (1, 0, 0)
    generations = abs(10 * (one.capability[0] - other.capability[0]) + one.capability[1] - other.capability[1])
    return (2, generations, abs(one.multiprocessors - other.multiprocessors))


def version_of(text: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _apart(wanted: str, measured: str) -> tuple[int, int, int]:
    """Difference of the versions; an equal version comes first."""
    (major, minor), (other_major, other_minor) = version_of(wanted), version_of(measured)
    return (abs(major - other_major), abs(minor - other_minor), int(wanted != measured))


def _warnings(gpu: str, torch: str, constants: CardConstants) -> Iterator[str]:
    if _distance(gpu, constants.gpu)[0] > 1:
        yield (
            f"memory of libraries was measured on {constants.gpu}, not on {gpu}; `carma calibrate` measures it on a "
            "server with that GPU"
        )
    majors, minors, _ = _apart(torch, constants.torch)
    if torch and (majors or minors > MINORS_APART):
        yield f"memory of libraries was measured with torch {constants.torch}, and the script has {torch}"
