"""The daemon: one event loop around the pure core. Only main.py builds real objects."""
