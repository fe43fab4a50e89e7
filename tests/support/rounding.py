"""Products and sums of XLA on a CPU, each rounded on its own.

Fused, XLA's CPU backend lets the compiler make one instruction of a product and a sum, which rounds
once: what is fused decides bits. x86 processors have it since AVX2; here XLA must not use it.
"""

import os
import platform

IS_ROUNDED_TWICE = platform.machine().lower() in ("x86_64", "amd64")
_FLAG = "--xla_cpu_max_isa=AVX"


def round_products() -> None:
    """Before JAX has its devices, for this process and those that it starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if IS_ROUNDED_TWICE and _FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}".strip()
