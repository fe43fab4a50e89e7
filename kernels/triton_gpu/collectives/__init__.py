"""Collectives of tensor parallelism: all-gather and its buffers."""
