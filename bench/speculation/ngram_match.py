"""Host time of one step's n-gram matching for a batch.

    python -m bench.speculation.ngram_match --out bench/results/ngram_match.json

Texts are a Markov chain over a vocabulary of realistic size, which repeats itself as text does. The
index first contains the texts of earlier requests. Each step then commits some tokens of every
request and builds its tree. `match_ms` is the time that a step of the engine waits, `learn_ms` the
time to insert the tokens into the trie while the device runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

import numba
import numpy as np

from bench.common.environment import write_results
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import Request, SamplingParams
from shared.options.ngram import NgramConfig

VOCAB = 151936
WORDS = 20000
BRANCHES = 4
EARLIER_TOKENS = 400_000
CORPUS_TOKENS = 200_000
PROMPT = 512
PER_STEP = 3
WARM_UP = 20
STEPS = 200


class Language:
    """A Markov chain: each word is followed by one of a few, mostly by its first."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = self._rng.choice(VOCAB, WORDS, replace=False)
        self._next = self._rng.integers(0, WORDS, (WORDS, BRANCHES))

    def text(self, length: int) -> list[int]:
        shares = np.array([0.7, 0.15, 0.1, 0.05])
        state, found = int(self._rng.integers(WORDS)), []
        for choice in self._rng.choice(BRANCHES, length, p=shares):
            state = self._next[state, choice]
            found.append(int(self._words[state]))
        return found


def measure(
    batch: int, nodes: int, num_corpora: int, match_type: str
) -> dict[str, float | int | str]:
    """One line of the table."""
    config = NgramConfig(
        speculative_ngram_external_sam_budget=nodes // 2 if num_corpora else 0,
        speculative_ngram_match_type=match_type,
    )
    index = NgramIndex(config, nodes=nodes, depth=nodes - 1, vocab=VOCAB, chain=False)
    language = Language(1)
    for name in range(num_corpora):
        words = np.array([*language.text(CORPUS_TOKENS), SEPARATOR], np.int32)
        index.corpora.add(str(name), Corpus.build(words))
    earlier = Request(request_id=-1, prompt=(), sampling=SamplingParams())
    index.add_tokens(earlier, language.text(EARLIER_TOKENS))
    index.end(earlier, is_learnt=True)
    requests = [
        Request(request_id=number, prompt=(), sampling=SamplingParams()) for number in range(batch)
    ]
    for request in requests:
        index.add_tokens(request, language.text(PROMPT))
    index.draft(requests)
    times = np.array([_step(index, requests, language) for _ in range(WARM_UP + STEPS)])[WARM_UP:]
    medians, worst = np.median(times, axis=0), np.percentile(times, 99, axis=0)
    return {
        "batch": batch,
        "nodes": nodes,
        "corpora": num_corpora,
        "match_type": match_type,
        "ngrams": index.num_ngrams,
        "rows_without_match": round(index.num_empty_rows / index.num_rows, 3),
        "match_ms": round(1e3 * medians[0], 3),
        "match_ms_p99": round(1e3 * worst[0], 3),
        "learn_ms": round(1e3 * medians[1], 3),
        "learn_ms_p99": round(1e3 * worst[1], 3),
    }


def _step(index: NgramIndex, requests: list[Request], language: Language) -> tuple[float, float]:
    tokens = [language.text(PER_STEP) for _ in requests]
    began = time.perf_counter()
    for request, new in zip(requests, tokens, strict=True):
        index.add_tokens(request, new)
    index.draft(requests)
    matched = time.perf_counter()
    index.learn()
    return matched - began, time.perf_counter() - matched


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {
        "command": "python -m bench.speculation.ngram_match",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "tokens_per_step": PER_STEP,
        "lines": [],
    }
    cases = [(1, 12, 0, "BFS"), (64, 12, 0, "BFS"), (64, 12, 0, "PROB"), (64, 12, 2, "BFS")]
    for case in [*cases, (64, 32, 2, "BFS")]:
        found["lines"].append(measure(*case))
        print(json.dumps(found["lines"][-1]), flush=True)
    if args.out:
        write_results(args.out, found)


if __name__ == "__main__":
    main()
