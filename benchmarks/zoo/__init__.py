"""Every decoder of transformers, tiny and random, compiled: what is rewritten, and what is not."""
