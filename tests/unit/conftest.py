"""Fixtures that several files share."""

from tests.unit.cli.estimate_world import world

__all__ = ["world"]
