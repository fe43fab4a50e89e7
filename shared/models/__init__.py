"""Model checkpoints: config, mapping of parameters to tensors, and the files of their weights."""
