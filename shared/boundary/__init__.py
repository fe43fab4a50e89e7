"""All that host and device know of each other: plans, results, limits, and their buffers."""
