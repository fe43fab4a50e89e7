"""HTTP: the process that clients talk to; it knows the tokenizer and no device framework."""
