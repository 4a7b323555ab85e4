"""Fakes, builders and private daemons for tests of CARMA and of its plugins."""
