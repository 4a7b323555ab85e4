"""Fakes, builders, contract suites and private daemons, public for authors of plugins. Must not import pytest."""
