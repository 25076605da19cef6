"""Page stores, handle tensors and the launching of kernels."""
