"""All that exists once for both backends; no jax, torch or triton anywhere in it."""

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036  # older ones cannot import what follows
    found = platform.python_version()
    print(f"Python 3.11 or newer is required, and this is Python {found}", file=sys.stderr)
    raise SystemExit(2)

VERSION = "0.2.0"
"""Version of the project, as in `pyproject.toml`."""
