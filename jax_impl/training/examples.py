"""Tokenises data files into batches of token rows, in few shapes and in a seeded order.

A line of a data file is a JSON object in one of the formats of `jax_impl.training.lines`. A chat is
tokenised as in the server: the messages before an answer are rendered as the prompt of a request,
and the answer ends with the tokenizer's end token. `python -m jax_impl.training.examples` is the
worker process that `read_rows` starts per core. It must not import JAX, which would initialise the
device.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from jax_impl.training.file_lock import locked
from jax_impl.training.lines import for_template, read_line
from shared import children
from shared.text.chat_template import Conversation, TemplateError
from shared.text.tokenizer import Tokenizer
from shared.text.tool_messages import read_functions

WIDTH_STEP = 64
"""Rows are padded to multiples of it; chunked GDN prefill requires multiples of its chunk."""

MAX_WIDTHS = 4
BYTES_PER_WORKER = 4 << 20
FORM = 3  # version of the cache; incremented when tokenisation changes
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
)


@dataclass(frozen=True)
class RaggedRows:
    """Token rows of different lengths, one after the other.

    Attributes:
      tokens: Tokens of all rows.
      is_answer: True for tokens of answers, which are the labels.
      starts: First token of each row, and the end.
      num_dropped: Number of rows that were dropped because they are too long.
    """

    tokens: Int32[np.ndarray, " T"]
    is_answer: Bool[np.ndarray, " T"]
    starts: Int64[np.ndarray, " rows1"]
    num_dropped: int

    @property
    def lengths(self) -> Int64[np.ndarray, " rows"]:
        return np.diff(self.starts)

    @classmethod
    def of(cls, rows: Iterable["Row"], max_tokens: int) -> "RaggedRows":
        """Concatenates rows; drops rows of more than `max_tokens` tokens."""
        kept, num_dropped = [], 0
        for row in rows:
            fits = len(row.tokens) <= max_tokens
            num_dropped += not fits
            kept += [row] if fits else []
        lengths = [len(row.tokens) for row in kept]
        tokens = np.fromiter((t for row in kept for t in row.tokens), np.int32, sum(lengths))
        answers = np.fromiter((a for row in kept for a in row.is_answer), bool, sum(lengths))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(tokens, answers, starts, num_dropped)

    @classmethod
    def join(cls, parts: Sequence["RaggedRows"]) -> "RaggedRows":
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.is_answer for part in parts]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            sum(part.num_dropped for part in parts),
        )


class Row(NamedTuple):
    """Tokens of one line, with True for those of an answer."""

    tokens: list[int]
    is_answer: list[bool]


class TrainingBatch(NamedTuple):
    """Rows padded on the right to one width, with the weight of each token as a label."""

    tokens: Int32[np.ndarray, "B T"]
    weights: Float32[np.ndarray, "B T"]


def read_rows(paths: Sequence[Path], tokenizer_folder: Path, max_tokens: int) -> RaggedRows:
    """Returns the token rows of data files; reuses the cache next to a file if it is valid.

    Raises:
      ValueError: A line is invalid, or no row fits in `max_tokens`; the message has file and byte.
    """
    rows = RaggedRows.join([_read_file(path, tokenizer_folder, max_tokens) for path in paths])
    if not rows.lengths.size:
        raise ValueError(f"{paths[0]} holds no example of at most {max_tokens} tokens")
    return rows


def read_prompts(paths: Sequence[Path], tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Returns the prompts of the first `count` lines; the last answer of a chat is dropped.

    Raises:
      ValueError: A line is invalid; the message has file and byte.
    """
    prompts: list[list[int]] = []
    for path in paths:
        for name, example in _examples(path, 0, path.stat().st_size):
            if len(prompts) == count:
                return prompts
            prompts.append(_prompt(name, example, tokenizer))
    return prompts


def open_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint's folder.

    Raises:
      ValueError: The folder has no tokenizer, or the tokenizer has no end token.
    """
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer.json; use a folder with a tokenizer")
    if tokenizer.end_id is None:
        raise ValueError(
            f"tokenizer_config.json in {folder} has no eos_token, which ends each answer; add it"
        )
    return tokenizer


def row_of(name: str, example: dict[str, Any], tokenizer: Tokenizer) -> Row:
    """Tokenises one line; the labels are the tokens of all answers, or all of a plain text.

    Raises:
      ValueError: The line is invalid; the message starts with `name`.
    """
    example = read_line(name, example)
    if "messages" not in example:
        prompt, answer = tokenizer.encode(example["prompt"]), example.get("answer")
        if answer is None:
            return Row(prompt, [True] * len(prompt))
        return _with_answer(name, Row(prompt, [False] * len(prompt)), answer, tokenizer)
    chat, row = _conversation(name, example), Row([], [])
    for turn, message in enumerate(chat.messages):
        if message["role"] == "assistant" and example["messages"][turn].get("weight") != 0:
            _check_answer(name, example["messages"][turn])
            prompt = _chat(name, replace(chat, messages=chat.messages[:turn]), tokenizer)
            row = _with_answer(name, _continued(row, prompt), message["content"], tokenizer)
    if not row.tokens:
        raise ValueError(
            f"{name} has no answer to learn; add a message of the role assistant without weight 0"
        )
    return row


def _check_answer(name: str, message: dict[str, Any]) -> None:
    """Raises ValueError for an answer with fields that only the chat template turns into text."""
    if message["content"] is None and not message.get("tool_calls"):
        raise ValueError(f"{name} has an answer that is not a string")
    for field in ("tool_calls", "reasoning_content", "reasoning"):
        if message.get(field):
            raise ValueError(
                f"{name} has an answer of {field}, which is not trained; write it as content, or "
                "set the weight of the message to 0"
            )


def _continued(row: Row, prompt: list[int]) -> Row:
    """Returns the prompt as a row; keeps the labels of `row` if the prompt starts with its tokens.

    A template may rewrite earlier answers, for example without their reasoning. The rewritten
    answers are then no labels.
    """
    known = len(row.tokens)
    if prompt[:known] != row.tokens:
        row, known = Row([], []), 0
    return Row(prompt, row.is_answer + [False] * (len(prompt) - known))


def _with_answer(name: str, row: Row, answer: Any, tokenizer: Tokenizer) -> Row:
    if not isinstance(answer, str):
        raise ValueError(f"{name} has an answer that is not a string")
    tokens = [*tokenizer.encode_more(answer), tokenizer.end_id]
    return Row(row.tokens + tokens, row.is_answer + [True] * len(tokens))


def _prompt(name: str, example: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    example = read_line(name, example)
    if "messages" not in example:
        return tokenizer.encode(example["prompt"])
    chat = _conversation(name, example)
    while chat.messages and chat.messages[-1]["role"] == "assistant":
        chat.messages.pop()
    if not chat.messages:
        raise ValueError(f"{name} has no message before its answer; add the user's message")
    return _chat(name, chat, tokenizer)


def _conversation(name: str, example: dict[str, Any]) -> Conversation:
    """Returns a chat in OpenAI's format as the input of a chat template."""
    messages, tools = example["messages"], example.get("tools") or []
    variables = example.get("chat_template_kwargs") or {}
    if not isinstance(tools, list):
        raise ValueError(f"{name}: tools must be a list of objects")
    try:
        read_functions(tools)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(variables, dict):
        raise ValueError(f"{name}: chat_template_kwargs must be an object")
    try:
        return Conversation(list(map(for_template, messages)), tools, variables)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{name}: a message is invalid for a chat template: {error}") from error


def _chat(name: str, chat: Conversation, tokenizer: Tokenizer) -> list[int]:
    if not tokenizer.has_chat_template:
        raise ValueError(
            f"{name} is a chat, and the tokenizer has no chat template; use lines with prompt and "
            "answer, or add chat_template.jinja to the tokenizer's folder"
        )
    try:
        return tokenizer.encode_more(tokenizer.render_chat(chat))
    except TemplateError as error:
        raise ValueError(f"{name}: {error}") from error


def _examples(path: Path, start: int, end: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the examples of lines that begin in bytes `start` to `end`, each with its location."""
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        while (offset := file.tell()) < end:
            name, line = f"{path}, byte {offset}", file.readline()
            if line.strip():
                yield name, _parsed(name, line)


def _parsed(name: str, line: bytes) -> dict[str, Any]:
    try:
        example = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(example, dict):
        raise ValueError(f"{name} must be a JSON object")
    return example


def _read_file(path: Path, tokenizer_folder: Path, max_tokens: int) -> RaggedRows:
    if not path.is_file():
        raise ValueError(f"the data file {path} does not exist")
    cache = path.with_name(path.name + ".tokens.npz")
    wanted = _fingerprint(path, tokenizer_folder, max_tokens)
    with locked(cache):
        if not cache.is_file() or not (rows := _load(cache, wanted)):
            rows = _tokenised(path, tokenizer_folder, max_tokens)
            _save(cache, rows, wanted)
    return rows


def _fingerprint(path: Path, tokenizer_folder: Path, max_tokens: int) -> str:
    """Returns a key of everything that the token rows of a file depend on."""
    digest, facts = hashlib.sha256(), path.stat()
    for name in TOKENIZER_FILES:
        file = tokenizer_folder / name
        digest.update(file.read_bytes() if file.is_file() else b"-")
    return f"{FORM} {facts.st_size} {facts.st_mtime_ns} {max_tokens} {digest.hexdigest()}"


def _load(cache: Path, wanted: str) -> RaggedRows | None:
    try:
        with np.load(cache) as stored:
            if str(stored["fingerprint"]) != wanted:
                return None
            dropped = int(stored["num_dropped"])
            return RaggedRows(stored["tokens"], stored["is_answer"], stored["starts"], dropped)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None  # an interrupted write


def _save(cache: Path, rows: RaggedRows, fingerprint: str) -> None:
    np.savez(
        cache,
        tokens=rows.tokens,
        is_answer=rows.is_answer,
        starts=rows.starts,
        num_dropped=rows.num_dropped,
        fingerprint=fingerprint,
    )


def _tokenised(path: Path, tokenizer_folder: Path, max_tokens: int) -> RaggedRows:
    """Tokenises a file; a large one in one process per core."""
    size = path.stat().st_size
    num_workers = min(os.cpu_count() or 1, -(-size // BYTES_PER_WORKER))
    if num_workers <= 1:
        return _part(path, tokenizer_folder, max_tokens, 0, size)
    bounds = [size * i // num_workers for i in range(num_workers + 1)]
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{i}.npz" for i in range(num_workers)]
        spans = zip(bounds[:-1], bounds[1:], outs, strict=True)
        workers = [_start(path, tokenizer_folder, max_tokens, *span) for span in spans]
        faults = [worker.communicate()[1] for worker in workers]
        for worker, fault in zip(workers, faults, strict=True):
            if worker.returncode:
                raise ValueError(fault.strip().splitlines()[-1])
        return RaggedRows.join([rows for out in outs if (rows := _load(out, "part"))])


def _start(
    path: Path, tokenizer_folder: Path, max_tokens: int, start: int, end: int, out: Path
) -> subprocess.Popen:
    words = map(str, (path, tokenizer_folder, max_tokens, start, end, out))
    command = children.command("jax_impl.training.examples", *words)
    return subprocess.Popen(command, env=children.environment(), stderr=subprocess.PIPE, text=True)


def _part(path: Path, tokenizer_folder: Path, max_tokens: int, start: int, end: int) -> RaggedRows:
    tokenizer = open_tokenizer(tokenizer_folder)
    examples = _examples(path, start, end)
    return RaggedRows.of((row_of(name, line, tokenizer) for name, line in examples), max_tokens)


class Batches:
    """Batches of a run by step number, so that a run can resume at any step.

    Each epoch has an order of its own and contains every row once, except for the few rows that do
    not fill a batch. A width with too few rows for one batch repeats them.

    Attributes:
      widths: Padded widths of the batches, ascending; few, because each is a compiled program.
    """

    def __init__(
        self, rows: RaggedRows, batch_tokens: int, seed: int, prompt_weight: float, shares: int
    ) -> None:
        """Plans the batches.

        Args:
          batch_tokens: Tokens of a batch, padding included.
          prompt_weight: Weight of tokens outside answers.
          shares: Number of devices; the rows of a batch are a multiple of it.
        """
        self._rows, self._seed, self._prompt_weight = rows, seed, prompt_weight
        self.widths = best_widths(rows.lengths, MAX_WIDTHS)
        width_of_row = np.searchsorted(self.widths, rows.lengths)
        self._members = [np.flatnonzero(width_of_row == i) for i in range(len(self.widths))]
        self._sizes = [max(1, batch_tokens // width // shares) * shares for width in self.widths]
        counts = [
            max(1, len(members) // size)
            for members, size in zip(self._members, self._sizes, strict=True)
        ]
        self._slots = [(i, n) for i, count in enumerate(counts) for n in range(count)]
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and width of every possible batch."""
        return list(zip(self._sizes, self.widths, strict=True))

    def at(self, step: int) -> TrainingBatch:
        """Returns the batch of a step, counted from 0."""
        epoch, position = divmod(step, len(self))
        if epoch != self._epoch:
            self._shuffle(epoch)
        which, number = self._slots[self._order[position]]
        size = self._sizes[which]
        return self._batch(self._shuffled[which][number * size :][:size], self.widths[which])

    def _shuffle(self, epoch: int) -> None:
        rng, self._epoch = np.random.default_rng((self._seed, epoch)), epoch
        self._order = rng.permutation(len(self._slots))
        self._shuffled = [
            np.resize(rng.permutation(members), max(len(members), size))
            for members, size in zip(self._members, self._sizes, strict=True)
        ]

    def _batch(self, chosen: Int64[np.ndarray, " B"], width: int) -> TrainingBatch:
        rows, columns = self._rows, np.arange(width)
        is_token = columns < rows.lengths[chosen][:, None]
        at = np.where(is_token, rows.starts[chosen][:, None] + columns, 0)
        tokens = np.where(is_token, rows.tokens[at], 0).astype(np.int32)
        weights = np.where(rows.is_answer[at], 1.0, self._prompt_weight) * is_token
        return TrainingBatch(tokens, weights.astype(np.float32))


def best_widths(lengths: Int64[np.ndarray, " rows"], most: int) -> tuple[int, ...]:
    """Returns at most `most` multiples of `WIDTH_STEP` with the fewest tokens of padding."""
    units = -(-lengths // WIDTH_STEP)
    counts = np.bincount(units)  # rows by length in units
    nonzero = [int(unit) for unit in np.flatnonzero(counts)]
    best: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {0: {0: (0, ())}}
    for number, unit in enumerate(nonzero, start=1):
        options: dict[int, tuple[int, tuple[int, ...]]] = {}
        for earlier in range(number):
            inside = int(counts[nonzero[earlier:number]].sum()) * unit
            for used, (padded, widths) in best[earlier].items():
                option = (padded + inside, (*widths, unit * WIDTH_STEP))
                if used < most:
                    options[used + 1] = min(options.get(used + 1, option), option)
        best[number] = options
    return min(best[len(nonzero)].values())[1]


def main(argv: Sequence[str]) -> int:
    """Writes the token rows of a part of a file; returns the exit code of the process."""
    parser = argparse.ArgumentParser(prog="python -m jax_impl.training.examples")
    parser.add_argument("path", type=Path)
    parser.add_argument("tokenizer", type=Path)
    for name in ("max_tokens", "start", "end"):
        parser.add_argument(name, type=int)
    parser.add_argument("out", type=Path)
    given = parser.parse_args(argv)
    try:
        rows = _part(given.path, given.tokenizer, given.max_tokens, given.start, given.end)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _save(given.out, rows, "part")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
