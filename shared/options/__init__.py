"""Flags of the server, and rules of unsupported combinations."""
