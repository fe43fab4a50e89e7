"""Tensor-parallel ranks as processes: start, supervision and common end."""
