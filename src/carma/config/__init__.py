"""Settings: one tree of structs, read from TOML files, the environment and flags, with the origin of each value."""

from carma.config.catalogue import Setting, catalogue
from carma.config.load import Line, Loaded, Origin, describe, load_settings, settings_of
from carma.config.settings_tree import Daemon, Settings

__all__ = [
    "Daemon", "Line", "Loaded", "Origin", "Setting", "Settings", "catalogue", "describe", "load_settings", "settings_of"
]  # fmt: skip
