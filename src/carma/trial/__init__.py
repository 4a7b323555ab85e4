"""Trace and replay: runs the user's script with only the GPU made up, and works out what a card would have held."""
