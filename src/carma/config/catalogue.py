"""Every setting by its dotted name: type, default, description, allowed values, and the parser of its values."""

from __future__ import annotations

import difflib
import math
from functools import cache
from typing import NamedTuple

import msgspec
from msgspec import inspect

from carma.config.settings_tree import Settings
from carma.core.model.units import parse_duration_s, parse_mib
from carma.plugins import POLICIES, load_policy, names

DEFAULT_USER = "default"  # all users without a value of their own
_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})


class Setting(NamedTuple):
    name: str  # gate.sm_active
    default: object
    description: str
    allowed: str  # a phrase: "a number from 0 to 1"
    annotation: object  # the type with its bounds, for msgspec.convert
    kind: inspect.Type

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]

    @property
    def key(self) -> str:
        return self.name.partition(".")[2]


@cache
def catalogue() -> dict[str, Setting]:
    """All settings of CARMA itself, in the order of the tree."""
    defaults = Settings()
    found: dict[str, Setting] = {}
    for section in sections():
        found.update(settings_in(section, getattr(defaults, section)))
    return found


def settings_in(section: str, defaults: msgspec.Struct) -> dict[str, Setting]:
    """The settings that a struct declares: its fields with their types, bounds and descriptions."""
    found: dict[str, Setting] = {}
    described = inspect.type_info(type(defaults))
    assert isinstance(described, inspect.StructType)
    for field, plain in zip(described.fields, msgspec.structs.fields(described.cls), strict=True):
        name = f"{section}.{field.name}"
        kind, description = _unwrap(field.type)
        default = getattr(defaults, field.name)
        found[name] = Setting(name, default, description, _allowed(kind, field.name), plain.type, kind)
    return found


def sections() -> tuple[str, ...]:
    return tuple(name for name in Settings.__struct_fields__ if name != "plugins")


def read(setting: Setting, value: object) -> object:
    """The value in the type of the setting. Text may have units, whatever source it comes from.

    Raises ValueError without details: the caller knows the origin, and `setting.allowed` describes the allowed values.
    """
    if isinstance(value, str):
        value = _from_text(setting, value.strip())
    if isinstance(setting.kind, inspect.DictType) and not isinstance(value, dict):
        value = {DEFAULT_USER: value}
    converted: object = msgspec.convert(value, type=setting.annotation)
    numbers = converted.values() if isinstance(converted, dict) else (converted,)
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        raise ValueError("not a finite number")  # TOML has nan and inf; nan passes every comparison with a bound
    return converted


def _from_text(setting: Setting, text: str) -> object:
    match setting.kind:
        case inspect.BoolType() if text.lower() in _YES | _NO:
            return text.lower() in _YES
        case inspect.VarTupleType():
            return [part.strip() for part in text.split(",") if part.strip()]
        case inspect.DictType() as kind:
            return _by_name(kind, text)
        case inspect.IntType():
            return int(text) if _is_number(text) or not setting.key.endswith("_mib") else parse_mib(text)
        case inspect.FloatType():
            return float(text) if _is_number(text) or not setting.key.endswith("_s") else parse_duration_s(text)
    return text  # msgspec rejects a text for a boolean


def _by_name(kind: inspect.DictType, text: str) -> dict[str, float]:
    """`default=4,anna=8`, or one number for all users."""
    number = int if isinstance(_unwrap(kind.value_type)[0], inspect.IntType) else float
    found: dict[str, float] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, _, value = part.rpartition("=")
        name = name.strip() or DEFAULT_USER
        if name in found:
            raise ValueError(f"{name} twice")
        found[name] = number(value)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unwrap(kind: inspect.Type) -> tuple[inspect.Type, str]:
    if isinstance(kind, inspect.Metadata):
        return kind.type, str((kind.extra_json_schema or {}).get("description", ""))
    return kind, ""


def _allowed(kind: inspect.Type, key: str) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case inspect.VarTupleType():
            return "a list of texts"
        case inspect.DictType(value_type=value_type):
            number = _allowed(_unwrap(value_type)[0], "")
            return f"{number} for all users, or by user: default=1,anna=2 (in a file: {{default = 1, anna = 2}})"
        case inspect.IntType() | inspect.FloatType():
            return _number(kind, key)
        case _:
            return "a text"


def _number(kind: inspect.IntType | inspect.FloatType, key: str) -> str:
    bounds = _bounds(kind)
    if key.endswith("_mib"):
        return f"a size in MiB{bounds}, or with its unit, such as 12GiB"
    if key.endswith("_s"):
        return f"a number of seconds{bounds}, or a duration such as 90s or 15m"
    return ("a whole number" if isinstance(kind, inspect.IntType) else "a number") + bounds


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {_plain(kind.ge)} to {_plain(kind.le)}"
    words = (("above", kind.gt), ("of at least", kind.ge), ("of at most", kind.le), ("below", kind.lt))
    return " and".join(f" {word} {_plain(bound)}" for word, bound in words if bound is not None)


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


# The settings that a policy declares.


def policy_of(section: str) -> str | None:
    """The registered policy with that name; environment variables have `_` for `-`."""
    if section in sections():
        return None
    wanted = section.lower().replace("_", "-")
    return next((name for name in names(POLICIES) if name.lower().replace("_", "-") == wanted), None)


def declared_by(policy: str) -> dict[str, Setting]:
    """The settings of a policy form a section with its name: `[quiet-bus]` in a file, `--set quiet-bus.weight=0.5`,
    `CARMA_QUIET_BUS__WEIGHT`. A policy is imported only if a setting of it is given, or if it is the policy in use and
    its settings are shown."""
    defaults = load_policy(policy).settings
    return {} if defaults is None else settings_in(policy, defaults)


def find(name: str) -> Setting | None:
    """The setting `gate.sm_active` or, of a policy, `quiet-bus.weight`; None if it is not declared."""
    own = catalogue().get(name)
    if own is not None:
        return own
    declared, name = _of_its_policy(name)
    return declared.get(name)


def nearest(name: str, *, is_section: bool) -> str | None:
    """The most similar name. The same key in another section counts: `gate.policy` leads to `placement.policy`."""
    declared, of_policy = _of_its_policy(name)
    if close := difflib.get_close_matches(of_policy, declared, n=1):
        return close[0]
    if is_section:
        return next(iter(difflib.get_close_matches(name, sections(), n=1)), None)
    by_key = {setting.key: setting.name for setting in reversed(catalogue().values())}
    key = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, catalogue(), n=1, cutoff=0.75)
    close_keys = difflib.get_close_matches(key, by_key, n=1, cutoff=0.7)
    return by_key.get(key) or next(iter([*close, *(by_key[each] for each in close_keys)]), None)


def _of_its_policy(name: str) -> tuple[dict[str, Setting], str]:
    """The settings of the policy that the section names, and the name with the registered name of the policy."""
    section, _, key = name.partition(".")
    policy = policy_of(section)
    return ({}, name) if policy is None else (declared_by(policy), f"{policy}.{key}")
