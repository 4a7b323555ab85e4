"""Settings: one tree of structs, TOML files, environment and flags, and for each value where it came from."""

from carma.config.catalogue import Setting, catalogue
from carma.config.load import Line, Loaded, Origin, describe, load_settings, settings_of
from carma.config.settings_tree import Daemon, Launch, Monitor, Settings, Virtual

__all__ = [
    "Daemon",
    "Launch",
    "Line",
    "Loaded",
    "Monitor",
    "Origin",
    "Setting",
    "Settings",
    "Virtual",
    "catalogue",
    "describe",
    "load_settings",
    "settings_of",
]
