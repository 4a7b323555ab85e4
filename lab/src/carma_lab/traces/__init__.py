"""Tools for traces: generate, import, transform, describe and plot them."""
