"""The Triton printer: what GPUs run."""
