"""The page of settings, from their catalogue."""

from __future__ import annotations

from carma.config import Setting, Settings, catalogue
from carma.config.load import FLAGS
from tools.markdown import MADE, code, paragraphs, table

INTRODUCTION = """\
# Settings

A TOML file, one section a heading below: `$CARMA_HOME/config.toml`, or `~/.config/carma/config.toml` over
`/etc/carma/config.toml`. Every setting can also be given as an environment variable (`CARMA_GATE__SM_ACTIVE=0.7`: two
underscores between section and name) and when the daemon is started (`carma up --set gate.sm_active=0.7`).

**Flag over environment over file over default.** `carma config show` prints each value with its origin,
`carma config check FILE` every mistake in a file. An unknown name is an error that names the nearest one. Settings are
read when the daemon starts; `carma down` and `carma up` read them again, and running tasks go on meanwhile.

Sizes are MiB, or with their unit (`"12GiB"`); durations are seconds, or with their unit (`"15m"`).
"""


def page() -> str:
    parts = [MADE, INTRODUCTION]
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
    """A default as it would stand in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
