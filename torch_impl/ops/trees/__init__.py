"""Draft trees: n-gram lookup, tree building, verify budget, slot state."""
