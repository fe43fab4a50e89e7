"""Disaggregated prefill in the engine process: serves and fetches KV cache records."""
