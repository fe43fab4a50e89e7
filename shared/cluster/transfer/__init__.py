"""Transfer of KV cache records between servers: shared memory within a host, TCP or NIXL."""
