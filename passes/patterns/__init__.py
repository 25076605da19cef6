"""Attention spellings, one a file, and the helpers that see through layout operators."""
