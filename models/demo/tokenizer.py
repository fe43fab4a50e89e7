"""Writes the demo model's tokenizer: `python -m models.demo.tokenizer [FOLDER]`.

The tokenizer is a byte-level BPE with 4,096 tokens, trained on the train split. Every digit is a
token, and the last three tokens are Qwen's special tokens. Every run writes the same bytes.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.demo.data import TEXT_SHARES, examples
from models.make_random import SPECIAL_TOKENS, tokenizer_config

ROOT = Path(__file__).resolve().parent
VOCAB = 4096
SEED = 4096
TRAINING_EXAMPLES = 24_000

# Qwen's pre-tokenizer pattern, with single digits.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train() -> Tokenizer:
    """Trains the tokenizer.

    Raises:
      RuntimeError: The training text has too few distinct words for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the text gives {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    return tokenizer


def _texts() -> Iterator[str]:
    for example in islice(examples("train", SEED, TEXT_SHARES), TRAINING_EXAMPLES):
        yield from (message["content"] for message in example.messages)
        yield example.answer


def write(folder: Path) -> None:
    """Trains the tokenizer and writes both of its files into `folder`."""
    _write_json(folder / "tokenizer.json", json.loads(train().to_str()))
    _write_json(folder / "tokenizer_config.json", tokenizer_config())


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
