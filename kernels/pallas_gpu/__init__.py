"""Kernels in Pallas, which lowers them to Triton."""

import sys

from jaxlib.triton import dialect

# MLIR asks for the module of an operation's dialect by this name, again for each operation while
# there is none, and looked for it in every folder: half of the time that lowering a kernel took.
sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)
