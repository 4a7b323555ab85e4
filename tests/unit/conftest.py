"""Fixtures that several files share."""

from tests.unit.asked_estimates import world

__all__ = ["world"]
