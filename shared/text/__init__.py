"""Tokenizer, chat templates and grammars of a checkpoint."""
