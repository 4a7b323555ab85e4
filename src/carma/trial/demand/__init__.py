"""What a training step keeps busy on a GPU, from a description of the model: arithmetic with fitted constants."""
