"""Reads the settings: flags over environment over the nearer file over the system's file over defaults.

Every mistake is reported, not only the first, each with its origin: a settings file that is half understood is worse
than none.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma.config.catalogue import Setting, catalogue, read, sections
from carma.config.settings_tree import Settings
from carma.errors import BadSettings
from carma.paths import Paths

Origin = str  # "default", a file's path, "environment CARMA_GATE__SM_ACTIVE", "flag --policy"
DEFAULT: Origin = "default"

# How the command line spells the settings that have a flag of their own; others go through --set.
FLAGS = {
    "placement.policy": "--policy",
    "virtual.gpus": "--virtual-gpus",
    "virtual.gpu_memory_mib": "--gpu-memory",
    "virtual.speed": "--speed",
    "daemon.log_level": "--log-level",
}


class Loaded(NamedTuple):
    settings: Settings
    origins: dict[str, Origin]  # for every setting, by its dotted name


class Line(NamedTuple):
    """One setting as `carma config show` prints it."""

    name: str
    value: object
    origin: Origin
    description: str
    default: object


class _Given(NamedTuple):
    name: str
    value: object
    origin: Origin


def settings_of(flags: Mapping[str, object]) -> Settings:
    """These, and the defaults: no file and no variable of the machine has a say, so that a run can be repeated."""
    return load_settings(None, {}, flags).settings


def load_settings(paths: Paths | None, environ: Mapping[str, str], flags: Mapping[str, object] | None = None) -> Loaded:
    """`flags` are dotted names with their values; None means that the flag was not given."""
    values: dict[str, object] = {}
    origins: dict[str, Origin] = dict.fromkeys(catalogue(), DEFAULT)
    problems: list[str] = []
    for given in _all_given(paths, environ, flags or {}, problems):
        setting = catalogue().get(given.name)
        if setting is None:
            problems.append(_unknown(given))
            continue
        try:
            values[given.name] = read(setting, given.value)
            origins[given.name] = given.origin
        except (ValueError, OverflowError):
            problems.append(_unusable(setting, given))
    if problems:
        raise BadSettings("\n".join(problems), "`carma config show --verbose` describes all settings")
    return Loaded(_build(values), origins)


def describe(settings: Settings, origins: Mapping[str, Origin]) -> list[Line]:
    """Every setting, in the order of the tree."""
    return [
        Line(
            name=setting.name,
            value=getattr(getattr(settings, setting.section), setting.key),
            origin=origins.get(setting.name, DEFAULT),
            description=setting.description,
            default=setting.default,
        )
        for setting in catalogue().values()
    ]


def _all_given(
    paths: Paths | None, environ: Mapping[str, str], flags: Mapping[str, object], problems: list[str]
) -> Iterator[_Given]:
    """From the farthest source to the nearest: the last one wins."""
    for file in (paths.system_config_file, paths.config_file) if paths is not None else ():
        if file is not None:
            yield from _from_file(file, problems)
    for variable, text in sorted(environ.items()):
        if variable.startswith("CARMA_") and "__" in variable:
            name = variable.removeprefix("CARMA_").lower().replace("__", ".", 1)
            yield _Given(name, text, f"environment {variable}")
    for name, value in flags.items():
        if value is not None:
            yield _Given(name, value, f"flag {FLAGS.get(name, '--set ' + name)}")


def _from_file(file: Path, problems: list[str]) -> Iterator[_Given]:
    try:
        tree = tomllib.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{file} cannot be read: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{file} is not TOML: {error}")
        return
    for section, content in tree.items():
        if section in sections() and not isinstance(content, dict):
            problems.append(f"{section} in {file} is a section, not a value; write [{section}] and its settings below")
        elif section in sections():
            yield from (_Given(f"{section}.{key}", value, str(file)) for key, value in content.items())
        else:
            yield _Given(section, content, str(file))


def _unknown(given: _Given) -> str:
    what = "section" if isinstance(given.value, dict) else "setting"
    near = _nearest(given.name, isinstance(given.value, dict))
    return f"there is no {what} {given.name!r} (in {given.origin})" + (f"; did you mean {near!r}?" if near else "")


def _nearest(name: str, is_section: bool) -> str | None:
    """A key under another section counts as near: `policy` and `gate.policy` both lead to `placement.policy`."""
    if is_section:
        return next(iter(difflib.get_close_matches(name, sections(), n=1)), None)
    key = name.rpartition(".")[2]
    same_key = [setting.name for setting in catalogue().values() if setting.key == key]
    by_key = {setting.key: setting.name for setting in catalogue().values()}
    close = difflib.get_close_matches(name, catalogue(), n=1, cutoff=0.75)
    close_key = [by_key[found] for found in difflib.get_close_matches(key, by_key, n=1, cutoff=0.7)]
    return next(iter([*same_key, *close, *close_key]), None)


def _unusable(setting: Setting, given: _Given) -> str:
    return f"{setting.name} = {given.value!r} (in {given.origin}) cannot be used: it must be {setting.allowed}"


def _build(values: Mapping[str, object]) -> Settings:
    changed: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed.setdefault(section, {})[key] = value
    settings = Settings()
    parts = {name: msgspec.structs.replace(getattr(settings, name), **keys) for name, keys in changed.items()}
    return msgspec.structs.replace(settings, **parts)
