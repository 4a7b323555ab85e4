"""The reference page of settings, from their catalogue."""

from __future__ import annotations

from carma.config import Setting, Settings, catalogue
from carma.config.load import FLAGS
from tools.markdown import GENERATED, code, paragraphs, table

INTRODUCTION = """\
# Settings

Settings are in a TOML file with the sections below: `$CARMA_HOME/config.toml`, or `~/.config/carma/config.toml`, which
overrides `/etc/carma/config.toml`. An environment variable (`CARMA_GATE__SM_ACTIVE=0.7`, with two underscores between
section and name) overrides the file, and a flag (`carma up --set gate.sm_active=0.7`) overrides the variable.

`carma config show` prints each value with its origin, and `carma config check FILE` all mistakes in a file. An unknown
name is an error that suggests the nearest name. The daemon reads its settings when it starts; after a change, run
`carma down` and `carma up`. Running tasks continue meanwhile.

Sizes are in MiB or have a unit (`"12GiB"`); durations are in seconds or have a unit (`"15m"`).
"""


def page() -> str:
    parts = [GENERATED, INTRODUCTION]
    sections: dict[str, list[Setting]] = {}
    for setting in catalogue().values():
        sections.setdefault(setting.section, []).append(setting)
    for section, settings in sections.items():
        parts.append(f"## {section}\n")
        about = paragraphs(_docstring(section))
        if about:
            parts.append(about + "\n")
        parts.append(table(["setting", "default", "allowed", "meaning"], [_row(setting) for setting in settings]))
    return "\n".join(parts)


def _docstring(section: str) -> str | None:
    text = type(getattr(Settings(), section)).__dict__.get("__doc__")
    return text if isinstance(text, str) else None


def _row(setting: Setting) -> list[str]:
    flag = f" Flag: {code(FLAGS[setting.name])}." if setting.name in FLAGS else ""
    return [code(setting.name), code(toml(setting.default)), setting.allowed, setting.description + flag]


def toml(value: object) -> str:
    """A default as in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
