"""Looking at real GPUs through NVML, inside this process. Nothing here decides anything or changes a card's mode."""
