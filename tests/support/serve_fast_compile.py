"""`python -m tests.support.serve_fast_compile ...` serves with JAX, compiled in a third of the
time.
"""

from __future__ import annotations

import sys

from jax_impl import backend, serve

if __name__ == "__main__":
    options = backend.compiler_options
    backend.compiler_options = lambda device, _: options(device, quick_compile=True)
    raise SystemExit(serve.main(sys.argv[1:]))
