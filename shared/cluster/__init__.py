"""Places processes on several hosts: the only room with Ray, named by `--launcher ray` alone."""
