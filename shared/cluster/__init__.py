"""Several hosts: start of ranks by Ray, and transfer of KV cache records between servers."""
