"""Training data: `python -m models.demo.data --split held_out --count 200 --out FILE`.

All examples are generated: word problems, copying tasks, code, chats and calls of tools, and SQL
for the demo adapter. A split and a seed give the same examples on every machine, and no problem is
in both splits.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from models.demo.agents import agents
from models.demo.chats import chats
from models.demo.copying import copying
from models.demo.example import Example, Split, answer_of
from models.demo.functions import functions
from models.demo.problems import problems
from models.demo.queries import queries

__all__ = ["KINDS", "Example", "Split", "answer_of", "examples", "main", "problems"]

KINDS = {
    "problems": problems,
    "copying": copying,
    "code": functions,
    "chats": chats,
    "tools": agents,
    "sql": queries,
}
TEXT_SHARES = {"problems": 0.5, "copying": 0.2, "code": 0.1, "chats": 0.2}
"""Shares of the kinds without tools: data of the tokenizer, and prompts of servers."""

TOOLS_SHARE = 0.1
SHARES = {kind: (1 - TOOLS_SHARE) * share for kind, share in TEXT_SHARES.items()}
SHARES["tools"] = TOOLS_SHARE
"""Shares of the training data."""

SYSTEM_SHARE = 0.05
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. End with #### and the number.",
    "Answer briefly.",
)


def examples(split: Split, seed: int, shares: Mapping[str, float]) -> Iterator[Example]:
    """Yields examples of some kinds by their shares, endlessly; some have a system prompt."""
    rng = random.Random(f"examples/{split}/{seed}")
    streams = [KINDS[kind](split, seed) for kind in shares]
    weights = list(shares.values())
    while True:
        for stream in rng.choices(streams, weights, k=64):
            yield _with_system(rng, next(stream))


def _with_system(rng: random.Random, example: Example) -> Example:
    if rng.random() >= SYSTEM_SHARE:
        return example
    prompt = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
    return replace(example, messages=[prompt, *example.messages])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes one JSON object with kind, messages, answer and tools per line."""
    parser = argparse.ArgumentParser(prog="python -m models.demo.data", description=__doc__)
    parser.add_argument("--split", choices=("train", "held_out"), required=True)
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="problems")
    parser.add_argument("--count", type=int, required=True, help="number of examples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    options = parser.parse_args(arguments)
    if options.kind == "all":
        stream = examples(options.split, options.seed, SHARES)
    else:
        stream = KINDS[options.kind](options.split, options.seed)
    with options.out.open("w", encoding="utf-8") as out:
        for example in islice(stream, options.count):
            line = {key: getattr(example, key) for key in ("kind", "messages", "answer")}
            line |= {"tools": example.tools} if example.tools else {}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
