"""The values of the core: tasks, attempts, GPUs, estimates, events, commands and settings. All immutable."""
