"""Settings: one tree of structs, read from TOML files, the environment and flags, with the origin of each value."""

from carma.config.catalogue import Setting, catalogue
from carma.config.load import LoadedSettings, Origin, SettingLine, describe, load_settings, settings_of
from carma.config.settings_tree import Daemon, Settings

__all__ = [
    "Daemon",
    "LoadedSettings",
    "Origin",
    "Setting",
    "SettingLine",
    "Settings",
    "catalogue",
    "describe",
    "load_settings",
    "settings_of"
]  # fmt: skip
