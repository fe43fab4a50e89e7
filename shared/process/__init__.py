"""Engine process: startup, main loop, IPC messages with the HTTP server, and memory plan."""
