"""The HTTP server: a process of its own beside the engine's."""
