"""Interface between host and device: plans, results, limits of a backend, and their buffers."""
