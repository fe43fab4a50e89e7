"""Attention: prefill, decode and verification, and the vision encoder."""
