"""A compiler for the KV cache: `torch.compile(model, backend="kvcompile")`."""
