"""Writes the configs of a recipe (families, count, seed, ranges) to a file, but never over those of another recipe.

Measuring rows of such a file takes hours, and they are useless without it. The file is written atomically.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from carma.core.model.values import Record
from carma.errors import Refused, Usage
from gpumemnet import Family
from gpumemnet.dataset.config import Config, encode, put_configs, read_configs, write_configs
from gpumemnet.dataset.generate import generate, name
from gpumemnet.dataset.ranges import Ranges

STDOUT = Path("-")
HINT = "--out sets another file; --force overwrites this one."


class Recipe(Record, frozen=True, kw_only=True):
    families: Sequence[Family]
    count: int
    seed: int
    ranges: Ranges


class Written(Record, frozen=True, kw_only=True):
    configs: int
    missed: Mapping[str, int]  # by family: configs far from the footprint they were drawn for


def write_recipe(recipe: Recipe, path: Path, force: bool = False) -> Written:
    """Overwrites an existing file only if all of its configs are written again."""
    old = {} if force or path == STDOUT or not path.is_file() else _read(path)
    made = {name(family, recipe.seed, number) for family in recipe.families for number in range(recipe.count)}
    if other := old.keys() - made:
        some = f"{len(other):,} of its configs are not made by this command, {min(other)} is one"
        raise Refused(f"{path} is there already: {some}", HINT)
    missed: dict[str, int] = {}
    try:
        return Written(configs=_write(_checked(recipe, old, path, missed), path), missed=missed)
    except BrokenPipeError:
        raise  # the reader has ended
    except OSError as error:
        raise Usage(f"{path} cannot be written: {error.strerror}", "--out names the file.") from error


def _read(path: Path) -> dict[str, bytes]:
    try:
        return {config.id: encode(config) for config in read_configs(path)}
    except (Usage, msgspec.MsgspecError) as error:
        raise Refused(f"{path} is there already, and holds no configs: {error}", HINT) from error


def _checked(recipe: Recipe, old: Mapping[str, bytes], path: Path, missed: dict[str, int]) -> Iterator[Config]:
    for family in recipe.families:
        for aimed in generate(family, recipe.count, recipe.seed, recipe.ranges):
            config = aimed.config
            if config.id in old and old[config.id] != encode(config):
                raise Refused(f"{path} is there already: its {config.id} was drawn from other ranges", HINT)
            missed[family] = missed.get(family, 0) + (not aimed.is_reached)
            yield config


def _write(configs: Iterator[Config], path: Path) -> int:
    if path == STDOUT:
        return put_configs(configs, sys.stdout.buffer)
    if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout or a pipe must not be replaced
        return write_configs(configs, path)
    part = path.with_name(path.name + ".part")
    try:
        count = write_configs(configs, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count
