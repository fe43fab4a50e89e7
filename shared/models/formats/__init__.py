"""Weight formats: arrays of a weight in memory, and quantised tensors of checkpoints."""
