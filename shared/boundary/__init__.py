"""All that host and device know of each other: plans, results, capacity, and their buffers."""
