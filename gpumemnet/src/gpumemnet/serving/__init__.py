"""GPUMemNet: memory by a learned model, from what a model summary tells. Serving only: numpy and onnxruntime."""
