"""Draft models and heads: configs, mapping of parameters to tensors, and tokenizer checks."""
