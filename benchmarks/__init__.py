"""Benchmarks of whole models and of kernels; each prints a table and can write JSON."""
