"""What CUDA, cuBLAS and cuDNN allocate beside tensors, measured on one GPU. Runs in the user's interpreter."""
