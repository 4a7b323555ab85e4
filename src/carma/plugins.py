"""Policies, estimators, verbs and extensions by name, from entry points. Built-in ones are registered in the same way.

A plugin is imported when it is used: listing names must not run code of plugins.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Literal

from carma.errors import BadSettings, NotInstalled, PluginError

if TYPE_CHECKING:
    from carma.core.model.values import Record
    from carma.core.scheduling.policy import Policy

Group = Literal["carma.policies", "carma.estimators", "carma.commands", "carma.extensions"]
POLICIES: Group = "carma.policies"
ESTIMATORS: Group = "carma.estimators"
COMMANDS: Group = "carma.commands"
EXTENSIONS: Group = "carma.extensions"
_WORD: dict[str, str] = {POLICIES: "policy", ESTIMATORS: "estimator", COMMANDS: "verb", EXTENSIONS: "extension"}

# Directory in the repository, and name of the distribution.
PACKAGES = {"gpumemnet": "carma-gpumemnet", "lab": "carma-lab"}

# The paper's names and their long forms.
_ALIASES = {
    "rr": "round-robin",
    "ff": "first-fit",
    "bf": "best-fit",
    "most-available-gpu-memory": "magm",
    "least-utilised-gpu": "lug",
    "least-utilized-gpu": "lug",
}
# In the published system, the name of a policy also named the source of memory estimates.
_PUBLISHED = {"oracle": '["declared"]', "or": "[]", "est": '["declared", "history"]'}


class Plugins(Mapping[str, object]):
    """The plugins of a group. `plugins[name]` imports one; it raises PluginError with the package's name."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._points = _find(group)

    def __getitem__(self, name: str) -> object:
        if name not in self._points:
            raise KeyError(name)
        return _import(self._points[name], _WORD.get(self._group, "plugin"))

    def __contains__(self, name: object) -> bool:  # Mapping's own would import the plugin
        return name in self._points

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


def load(group: Group) -> Plugins:
    return Plugins(group)


def names(group: Group) -> tuple[str, ...]:
    return tuple(load(group))


def load_one(group: Group, name: str) -> object:
    """One plugin. An unknown name is an error that suggests the nearest one."""
    plugins = load(group)
    if name not in plugins:
        raise unknown(_WORD[group], name, tuple(plugins))
    return plugins[name]


def extension(name: str, distribution: str, purpose: str) -> object:
    """A part of a verb that another distribution provides."""
    found = load(EXTENSIONS)
    if name not in found:
        raise not_installed(purpose, distribution)
    return found[name]


def not_installed(purpose: str, distribution: str) -> NotInstalled:
    package = PACKAGES[distribution]
    folders = "./gpumemnet ./lab" if distribution == "lab" else f"./{distribution}"  # the lab needs both
    return NotInstalled(
        f"`{purpose}` needs the distribution {package}, which is not installed",
        f"Run `pip install {folders}` in the directory of CARMA's source code.",
    )


def policy_name(text: str) -> str:
    """The registered name for `MAGM`, `rr`, `Best_Fit`. An unknown name is an error, never a default."""
    known = names(POLICIES)
    plain = text.strip().lower().replace("_", "-").replace(" ", "-")
    wanted = _ALIASES.get(plain, plain)
    for name in known:
        if name.lower().replace("_", "-") == wanted:
            return name
    source, _, rest = plain.partition("-")
    rest = _ALIASES.get(rest, rest)
    if source in _PUBLISHED and rest in known:
        raise BadSettings(
            f"there is no policy {text!r}: the source of memory estimates is a separate setting",
            f'Use policy = "{rest}" in [placement] and sources = {_PUBLISHED[source]} in [memory].',
        )
    raise unknown("policy", text, known)


def load_policy(text: str, settings: Mapping[str, Record] | None = None) -> Policy:
    """The policy of that name or alias. `settings`: by policy, where they are not its defaults."""
    from msgspec.structs import replace

    from carma.core.scheduling.policy import Policy

    name = policy_name(text)
    policy = load_one(POLICIES, name)
    if not isinstance(policy, Policy):
        raise PluginError(
            f"the policy {name!r} is a {type(policy).__name__}, not a carma.core.scheduling.policy.Policy",
            "Tell its author, or choose another policy.",
        )
    return replace(policy, settings=settings[name]) if settings and name in settings else policy


def unknown(word: str, name: str, known: tuple[str, ...]) -> BadSettings:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return BadSettings(f"there is no {word} {name!r}", f"{hint}There are: {', '.join(sorted(known)) or 'none'}.")


def _find(group: str) -> dict[str, EntryPoint]:
    """Entry points by name. A package that is found twice (installed, and in the working directory) is one plugin. Two
    packages with the same name are an error: otherwise the order of sys.path would decide."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise PluginError(
                f"two packages offer {point.name!r} as a {group} plugin: {_package(other)} and {_package(point)}",
                "Uninstall one of them.",
            )
    return found


def _import(point: EntryPoint, word: str) -> object:
    try:
        loaded: object = point.load()
    except Exception as error:
        raise PluginError(
            f"the {word} {point.name!r} of package {_package(point)} cannot be loaded: "
            f"{type(error).__name__}: {error} (from {point.value})",
            f"Reinstall or upgrade {_package(point)}, or choose another {word}.",
        ) from error
    return loaded


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value.partition(":")[0]
