"""Writes the configs of a recipe (families, count, seed, ranges) to a file, but never over those of another recipe.

Measuring rows of such a file takes hours, and they are useless without it. The file is written atomically.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from carma.errors import Refused, Usage
from gpumemnet import Family
from gpumemnet.dataset.config import Config, encode, read_configs, write_configs
from gpumemnet.dataset.generate import generate, name
from gpumemnet.dataset.ranges import Ranges

STDOUT = Path("-")
HINT = "--out sets another file; --force overwrites this one."


def write_recipe(
    families: Sequence[Family], count: int, seed: int, ranges: Ranges, path: Path, force: bool = False
) -> Mapping[str, int]:
    """Overwrites an existing file only if all of its configs are written again.

    Returns the number of configs of each family that are far from the footprint they were drawn for.
    """
    old = {} if force or path == STDOUT or not path.is_file() else _read(path)
    made = {name(family, seed, number) for family in families for number in range(count)}
    if other := old.keys() - made:
        some = f"{len(other):,} of its configs are not made by this command, {min(other)} is one"
        raise Refused(f"{path} is there already: {some}", HINT)
    missed: Counter[str] = Counter()

    def checked() -> Iterator[Config]:
        for aimed in itertools.chain.from_iterable(generate(family, count, seed, ranges) for family in families):
            config = aimed.config
            if old.get(config.id, encode(config)) != encode(config):
                raise Refused(f"{path} is there already: its {config.id} was drawn from other ranges", HINT)
            missed[config.family] += not aimed.is_reached
            yield config

    try:
        _write(checked(), path)
    except BrokenPipeError:
        raise  # the reader has ended
    except OSError as error:
        raise Usage(f"{path} cannot be written: {error.strerror}", "--out names the file.") from error
    return missed


def _read(path: Path) -> dict[str, bytes]:
    try:
        return {config.id: encode(config) for config in read_configs(path)}
    except (Usage, msgspec.MsgspecError) as error:
        raise Refused(f"{path} is there already, and holds no configs: {error}", HINT) from error


def _write(configs: Iterator[Config], path: Path) -> None:
    if path == STDOUT:
        write_configs(configs, sys.stdout.buffer)
        return
    # /dev/stdout or a pipe must not be replaced.
    is_replaced = not path.is_symlink() and (path.is_file() or not path.exists())
    target = path.with_name(path.name + ".part") if is_replaced else path
    try:
        with target.open("wb") as file:
            write_configs(configs, file)
        if is_replaced:
            target.replace(path)
    finally:
        if is_replaced:
            target.unlink(missing_ok=True)
