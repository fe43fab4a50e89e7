"""Start of ranks on several hosts by Ray; imported for `--launcher ray` only."""
