"""Sampling: LM head, filters, acceptance of draft tokens, logprobs."""
