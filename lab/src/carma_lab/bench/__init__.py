"""Experiments, each one command: the demo and the daemon's own figures. They print; they never assert."""
