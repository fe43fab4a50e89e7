"""Tensor-parallel all-gather and its symmetric buffers."""
