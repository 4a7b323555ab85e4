"""The demo: one trace through two private daemons on virtual GPUs, with exclusive and with shared GPUs."""
