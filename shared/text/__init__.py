"""What stands between text and tokens: a checkpoint's tokenizer and its chat template."""
