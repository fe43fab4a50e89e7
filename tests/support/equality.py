"""Comparison of outputs with the specification; near ties are distinguished from faults.

Float32 sums depend on their order, so two correct programs may choose differently between nearly
equal candidates. The specification chooses every token of an output again, on the output's own
prefix. A difference is excused only if the margin is below `MARGIN`; excused ones are counted and
printed at the end of the session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from shared.engine.request import SamplingParams
from shared.models.config import ModelConfig
from shared.spec import cache_pools, model, sampling
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import Sampling

MARGIN = 1e-4
"""Units of logits; the largest movement by another order of sums that was seen is 6e-5."""

MOST_EXCUSED = 1e-4
"""Share of tokens that may be excused before a test fails."""


@dataclass
class Tally:
    """Counts of comparisons in the session.

    Attributes:
      requests, preemptions: Counts of the randomly drawn requests.
    """

    tokens: int = 0
    excused: int = 0
    requests: int = 0
    preemptions: int = 0

    def __str__(self) -> str:
        return f"{self.tokens} tokens checked against the specification, {self.excused} excused"


def spec_sampling(params: SamplingParams, prompt_length: int, vocab: int, rows: int) -> Sampling:
    """A request's parameters as `rows` equal rows of the specification's."""
    stop_ids = params.stop_token_ids or (0,)
    bias = params.logit_bias or {0: 0.0}
    one = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": vocab if params.top_k is None else params.top_k,
        "min_p": params.min_p,
        "seed": params.seed32,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "repetition": params.repetition_penalty,
        "prompt_length": prompt_length,
        # Without stop tokens the field's ids mean nothing.
        "min_length": prompt_length + params.min_tokens if params.stop_token_ids else 0,
        "max_drafts": 0,
        "stop_ids": stop_ids,
        "bias_ids": tuple(bias),
        "bias_values": tuple(bias.values()),
        "calibration": (0.0,),
        "branch_calibration": (0.0,),
    }
    floats = {"temperature", "top_p", "min_p", "presence", "frequency", "repetition"}
    floats |= {"bias_values", "calibration", "branch_calibration"}
    arrays = {}
    for field in fields(Sampling):
        kind = np.float32 if field.name in floats else np.int32
        kind = np.uint32 if field.name == "seed" else kind
        arrays[field.name] = np.array([one[field.name]] * rows, kind)
    return Sampling(**arrays)


TALLY = Tally()
"""Counts of the whole session, printed at its end."""


def assert_few_excused() -> None:
    """Near ties are rare: at most one in 10^4 tokens, and one in a short session."""
    assert TALLY.excused <= max(1, MOST_EXCUSED * TALLY.tokens), TALLY


class Oracle:
    """Plain decoding by the specification, on any prefix."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
        self._config, self._weights = config, weights

    def check(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> list[int]:
        """Checks every token of a text.

        Returns:
          The places in `output` where the specification is too close to call and chose otherwise.
        """
        chosen, margins = self.choose(prompt, output, params)
        differ = np.flatnonzero(chosen != np.asarray(output))
        for place in differ:
            assert margins[place] < MARGIN, (
                f"token {place} of {list(output)} should be {chosen[place]} "
                f"by a margin of {margins[place]:.2g} (prompt {list(prompt)}, {params})"
            )
        TALLY.tokens += len(output)
        TALLY.excused += len(differ)
        return differ.tolist()

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Log softmax `[output, vocab]` of the raw logits before each token of a text."""
        text = np.array([*prompt, *output], np.int32)
        return sampling.log_softmax(self.logits(text[:-1])[len(prompt) - 1 :])

    def choose(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token after each prefix, and the margin of its logit."""
        text = np.array([*prompt, *output], np.int32)
        logits = self.logits(text[:-1])[len(prompt) - 1 :].copy()
        vocab, count = self._config.vocab, len(output)
        positions = np.arange(len(prompt), len(text), dtype=np.int32)
        seen = np.zeros((count, vocab), np.int32)
        seen[:, list(prompt)] = 1
        for place in range(1, count):
            seen[place:, output[place - 1]] += 2
        rows = spec_sampling(params, len(prompt), vocab, count)
        alone, row = sampling.counts_alone(seen, np.arange(count)), np.arange(count)
        processed = sampling.processed(logits, alone, positions, rows, row, None)
        perturbed = sampling.add_gumbel_noise(processed, rows, row, positions, TARGET_STREAM)
        best_two = np.sort(perturbed, axis=1)[:, -2:]
        scale = params.temperature or 1.0
        margins = (best_two[:, 1] - best_two[:, 0]) * scale
        chosen = perturbed.argmax(axis=1)
        edge = self._near_edge(logits, alone, positions, rows, output)
        return chosen, np.where(edge, 0.0, margins)

    def _near_edge(self, logits, seen, positions, rows, output) -> np.ndarray:
        """Marks tokens that are emitted if the support is wider or narrower by `MARGIN`."""
        found, row = np.zeros(len(output), bool), np.arange(len(output))
        for sign in (-1, 1):
            shifted = Sampling(
                **{field.name: getattr(rows, field.name) for field in fields(Sampling)}
                | {
                    "top_p": np.where(rows.top_p < 1, rows.top_p + sign * np.float32(MARGIN), 1)
                    .clip(1e-9, 1)
                    .astype(np.float32),
                    "min_p": np.where(rows.min_p > 0, rows.min_p - sign * np.float32(MARGIN), 0)
                    .clip(0, 1)
                    .astype(np.float32),
                }
            )
            chosen = sampling.choose(logits, seen, positions, shifted, row, None)
            found |= chosen.ids == np.asarray(output)
        return found

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        page_size = 16
        num_pages = 1 + -(-len(tokens) // page_size)
        kv = cache_pools.new_pools(self._config, num_pages, page_size)
        forward, _ = model.prefill(
            self._config,
            self._weights,
            kv,
            cache_pools.new_state(self._config, 1),
            tokens,
            np.array([0, len(tokens)], np.int32),
            np.zeros(1, np.int32),
            np.arange(1, num_pages, dtype=np.int32)[None],
            None,
            None,
            {},
        )
        return model.logits(self._config, self._weights, forward.hidden)
