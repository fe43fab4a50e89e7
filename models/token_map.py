"""Selects the draft vocabulary for `--speculative-token-map`.

    python -m models.token_map MODEL --texts answers.jsonl corpus.txt --size 32768 --out map.json

Counts the tokens of texts and writes the ids of the most frequent ones as a JSON list; of equal
counts the lower id comes first, so the same texts give the same list. The model's own outputs are
the best texts: `outputs.jsonl` of `python -m jax_impl.train`, or conversations with the model. The
end-of-sequence tokens are always included.

A file with the suffix .jsonl has one text per line: a string, a list of token ids, or an object
with `output_ids` (token ids), `messages` (the assistant's are counted), `answer` or `text`. Any
other file is one text.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from shared.drafts.token_map import most_frequent
from shared.models.families import config_from_folder
from shared.process.model_files import settings_folder
from shared.text.tokenizer import Tokenizer

FIELDS = ("output_ids", "messages", "answer", "completion", "text")


def counted(
    paths: Sequence[Path], tokenizer: Tokenizer | None, vocab: int
) -> Int64[np.ndarray, " vocab"]:
    """Counts each token in the texts of the files.

    Raises:
      ValueError: A line is not a text, or has token ids beyond the vocabulary.
    """
    counts = np.zeros(vocab, np.int64)
    for path in paths:
        for place, text in enumerate(_texts(path), 1):
            try:
                for tokens in _tokens(text, tokenizer):
                    if other := next((each for each in tokens if not 0 <= each < vocab), None):
                        raise ValueError(
                            f"it contains token id {other}; valid ids are 0 to {vocab - 1}"
                        )
                    counts += np.bincount(np.array(tokens, np.int64), minlength=vocab)
            except ValueError as error:
                raise ValueError(f"{path}, text {place}: {error}") from error
    return counts


def _texts(path: Path) -> Iterator[Any]:
    try:
        if path.suffix != ".jsonl":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _read_line(line, number)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not valid JSON: {error}") from error


def _tokens(text: Any, tokenizer: Tokenizer | None) -> Iterator[list[int]]:
    """Yields the tokens of a text, or of each of its fields."""
    if isinstance(text, dict):
        if text.keys() == {"target"}:
            return  # the first line of a file of outputs, which names the target
        names = [field for field in FIELDS if text.get(field) is not None]
        if not names:
            raise ValueError(f"it has none of the fields {', '.join(FIELDS)}")
        for name in names:
            yield from _tokens_of_field(name, text[name], tokenizer)
        return
    if isinstance(text, list) and all(type(each) is int for each in text):
        yield text
        return
    yield _encoded(text, tokenizer)


def _tokens_of_field(name: str, value: Any, tokenizer: Tokenizer | None) -> Iterator[list[int]]:
    """Yields the tokens of a field; only those of the assistant for `messages`."""
    if name == "messages" or (name == "completion" and not isinstance(value, str)):
        _check_messages(value)
        said = (each for each in value if each.get("role") == "assistant")
        yield from (_encoded(each.get("content") or "", tokenizer) for each in said)
        return
    yield from _tokens(value, tokenizer)


def _check_messages(messages: Any) -> None:
    if not (isinstance(messages, list) and all(isinstance(each, dict) for each in messages)):
        raise ValueError("its messages must be a list of objects")


def _encoded(text: Any, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise ValueError(f"it must be a text or a list of token ids, got {type(text).__name__}")
    if tokenizer is None:
        raise ValueError("the model has no tokenizer; give token ids")
    return tokenizer.encode_more(text)


def write(folder: Path, paths: Sequence[Path], size: int, out: Path) -> float:
    """Writes the list of token ids.

    Returns:
      The share of the tokens of the texts that the list covers.

    Raises:
      ValueError: The texts have no tokens; see also `counted` and `most_frequent`.
    """
    config = config_from_folder(folder)
    counts = counted(paths, Tokenizer.from_folder(folder), config.vocab)
    if not counts.any():
        raise ValueError("the texts have no tokens")
    ids = most_frequent(counts, size, config.eos_ids)
    out.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")
    return float(counts[ids].sum() / counts.sum())


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    found = argparse.ArgumentParser(prog="python -m models.token_map")
    found.add_argument("model", help="folder or hub id of the target, with its tokenizer")
    found.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FILE")
    found.add_argument("--size", type=int, default=32_768, help="number of tokens in the list")
    found.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return found


def main() -> None:
    """Runs the command line."""
    given = parser().parse_args()
    try:
        part = write(settings_folder(given.model), given.texts, given.size, given.out)
    except (ValueError, OSError) as error:
        sys.exit(f"python -m models.token_map: {error}")
    print(f"{given.out} covers {part:.2%} of the tokens of the texts")


if __name__ == "__main__":
    main()
