"""Replays the allocations of a trial run through a model of PyTorch's allocator and of the libraries' workspaces."""
