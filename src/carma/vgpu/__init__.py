"""Virtual GPUs: real processes that allocate memory and make progress on a simulated device. Quick to import."""
