"""Transfer of KV cache records between servers: within a host by shared memory, else by TCP."""
