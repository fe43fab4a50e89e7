"""GPU kernels in Pallas, compiled by its Triton and Mosaic GPU backends."""

import sys

from jaxlib.triton import dialect

# MLIR imports an operation's dialect by this name. Without the module, it searches every import
# path again for each operation, which took half of a kernel's lowering time.
sys.modules.setdefault("jaxlib.mlir.dialects.tt", dialect)
