"""Start of ranks on several hosts by Ray (`--distributed-executor-backend ray`)."""
