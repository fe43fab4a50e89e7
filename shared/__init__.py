"""All that exists once for both backends; no jax, torch or triton anywhere in it."""

VERSION = "0.1.0"
"""Version of the project, as in `pyproject.toml`."""
