"""GEMMs with fused norms and epilogues, FP8, and row-wise layers."""
