"""Long runs of a server: its resources must not grow, and its outputs must not change."""
