"""Reading real GPUs through NVML, inside this process. Decides nothing and changes no mode of a card."""
