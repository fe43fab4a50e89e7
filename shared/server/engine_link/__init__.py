"""Connection to the engine process, worker processes and metrics."""
