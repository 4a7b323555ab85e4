"""GPUMemNet: memory estimates of a learned model from a model summary. Needs numpy and onnxruntime only."""
