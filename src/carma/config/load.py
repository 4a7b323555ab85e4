"""Reads the settings. Order: flags, environment, the user's file, the system's file, defaults.

All mistakes are reported together, each with its origin. A file with a mistake is never used in part.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from carma.config.catalogue import Setting, catalogue, declared_by, find, nearest, policy_of, read, sections
from carma.config.settings_tree import Settings
from carma.core.model.values import Record
from carma.errors import BadSettings, PluginError
from carma.paths import Paths
from carma.plugins import load_policy, policy_name

_FIX_SETTING = "`carma config show --verbose` describes all settings"
_FIX_FILE = "correct the file, make it readable for you, or choose another directory with CARMA_HOME"
Origin = str  # "default", a file's path, "environment CARMA_GATE__SM_ACTIVE", "flag --policy"
DEFAULT: Origin = "default"

# Flags of settings; all other settings are given with --set.
FLAGS = {
    "placement.policy": "--policy",
    "virtual.gpus": "--virtual-gpus",
    "virtual.gpu_memory_mib": "--gpu-memory",
    "virtual.speed": "--speed",
    "daemon.log_level": "--log-level",
}


class LoadedSettings(NamedTuple):
    settings: Settings
    origins: dict[str, Origin]  # for every setting, by its dotted name


class SettingLine(NamedTuple):
    """A setting with its value, as in `carma config show`."""

    name: str
    value: object
    origin: Origin
    description: str


class _Given(NamedTuple):
    name: str
    value: object
    origin: Origin


def settings_of(flags: Mapping[str, object]) -> Settings:
    """Settings of these values and the defaults, without files and environment, so that a run can be repeated."""
    return load_settings(None, {}, flags).settings


def load_settings(
    paths: Paths | None, environ: Mapping[str, str], flags: Mapping[str, object] | None = None
) -> LoadedSettings:
    """`flags` are values by dotted name; None stands for a flag that was not given."""
    values: dict[str, object] = {}
    origins: dict[str, Origin] = dict.fromkeys(catalogue(), DEFAULT)
    unusable: list[str] = []  # files that cannot be read at all
    problems: list[str] = []
    for given in _all_given(paths, environ, flags or {}, unusable, problems):
        setting = find(given.name)
        if setting is None:
            problems.append(_unknown(given))
            continue
        try:
            values[setting.name] = read(setting, given.value)
            origins[setting.name] = given.origin
        except (ValueError, OverflowError):
            place = f"{setting.name} = {given.value!r} (in {given.origin})"
            problems.append(f"{place} is not a valid value: it must be {setting.allowed}")
    if unusable or problems:
        raise BadSettings("\n".join(unusable + problems), _FIX_FILE if unusable else _FIX_SETTING)
    return LoadedSettings(_build(values), origins)


def describe(settings: Settings, origins: Mapping[str, Origin]) -> list[SettingLine]:
    """Every setting, in the order of the tree; then those that the policy declares."""

    def line(section: object, setting: Setting) -> SettingLine:
        value = getattr(section, setting.key)
        return SettingLine(setting.name, value, origins.get(setting.name, DEFAULT), setting.description)

    lines = [line(getattr(settings, setting.section), setting) for setting in catalogue().values()]
    with suppress(PluginError, BadSettings):  # a policy that is missing or broken is reported where it is used
        name = policy_name(settings.placement.policy)
        section = settings.plugins.get(name, load_policy(name).settings)
        lines += [line(section, setting) for setting in declared_by(name).values()]
    return lines


def _all_given(
    paths: Paths | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    unusable: list[str],
    problems: list[str],
) -> Iterator[_Given]:
    """All given values, in increasing order of precedence."""
    for file in (paths.system_config_file, paths.config_file) if paths is not None else ():
        if file is not None:
            yield from _from_file(file, unusable, problems)
    for variable, text in sorted(environ.items()):
        if variable.startswith("CARMA_") and "__" in variable:
            name = variable.removeprefix("CARMA_").lower().replace("__", ".", 1)
            yield _Given(name, text, f"environment {variable}")
    for name, value in flags.items():
        if value is not None:
            yield _Given(name, value, f"flag {FLAGS.get(name, '--set ' + name)}")


def _from_file(file: Path, unusable: list[str], problems: list[str]) -> Iterator[_Given]:
    try:
        tree = tomllib.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return
    except OSError as error:
        unusable.append(f"{file} cannot be read: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        unusable.append(f"{file} is not TOML: {error}")
        return
    for section, content in tree.items():
        if section in sections() and not isinstance(content, dict):
            problems.append(
                f"{section} in {file} is a section, not a setting; write [{section}] and its settings below it"
            )
        elif section in sections() or (isinstance(content, dict) and policy_of(section) is not None):
            yield from (_Given(f"{section}.{key}", value, str(file)) for key, value in content.items())
        else:
            yield _Given(section, content, str(file))


def _unknown(given: _Given) -> str:
    is_section = isinstance(given.value, dict)
    what = "section" if is_section else "setting"
    near = nearest(given.name, is_section=is_section)
    return f"there is no {what} {given.name!r} (in {given.origin})" + (f"; did you mean {near!r}?" if near else "")


def _build(values: Mapping[str, object]) -> Settings:
    changed: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed.setdefault(section, {})[key] = value
    settings = Settings()
    parts: dict[str, object] = {}
    plugins: dict[str, Record] = {}
    for name, keys in changed.items():
        if name in sections():
            parts[name] = msgspec.structs.replace(getattr(settings, name), **keys)
        else:
            defaults = load_policy(name).settings
            assert defaults is not None
            plugins[name] = msgspec.structs.replace(defaults, **keys)
    return msgspec.structs.replace(settings, plugins=plugins, **parts)
