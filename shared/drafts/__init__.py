"""What a draft model is: its config, which tensor lies where, and whose tokenizer it has."""
