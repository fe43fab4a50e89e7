"""The demo model: the data it is trained on, its tokenizer and its checkpoint."""
