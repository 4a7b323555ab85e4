"""Fixtures that several tests of this distribution share."""
