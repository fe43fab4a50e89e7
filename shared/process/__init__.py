"""The engine's process: its start, its loop, the frames of its socket, and its memory plan."""
