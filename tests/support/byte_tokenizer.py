"""Tokenizer with a token for each byte, for servers without a model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|image|>"]


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; then the special tokens; then one that is two characters and a half."""
    letters = byte_letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
