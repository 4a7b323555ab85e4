"""Virtual GPUs: real processes that allocate and progress on a made-up device. Must stay quick to import."""
