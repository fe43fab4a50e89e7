"""Outputs of the engine without a model: the prompt repeated, with the requested extra results."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from shared.engine.request import DRAFT, PLAIN, PREFILL, Request, StepTrace
from shared.spec.logprobs import PromptLogprobs

VOCAB = 300  # ids 260 to 299 are beyond the tokenizer
FILLER = ord("-")
# First tokens of a prompt; the last one also biased.
CRASH, FAIL, SLOW, REJECTED, FREEZE = range(290, 295)
HELD = [SLOW, SLOW]
"""Prompt of a request that gets no token after its first step until `release`."""
RELEASED = "released"
FROZEN = "the step hangs"
"""Line of an engine that has begun the step of FREEZE."""


def is_held(request: Request) -> bool:
    """Returns True if a request gets no token before `release`."""
    return bool(request.output) and [*request.prompt[:2]] == HELD


def release(folder: Path) -> None:
    """Lets requests of HELD continue, if the folder is that of their server's model."""
    (folder / RELEASED).touch()


def step_of(request: Request, tokens: list[int], accepted: int | None) -> StepTrace:
    """Drafts that were right, and two that were not: the root's other child, and the last one."""
    right = tokens[:-1]
    drafts = [*right, FILLER, FILLER] if accepted else []
    parents = [*range(len(right)), 0, len(right)] if accepted else []
    return StepTrace(
        number=len(request.output),
        source=PREFILL if accepted is None else DRAFT if accepted else PLAIN,
        num_rows=1,
        at_ms=1e3 * (time.monotonic() - request.began),
        host_ms=2.0,
        device_ms=1.5,
        drafts=drafts,
        parents=parents,
        path=list(range(1, len(right) + 1)),
        origins=[DRAFT] * len(drafts),
    )


def token_of(request: Request, index: int) -> int:
    """Token `index` of the output."""
    sampling = request.sampling
    at = index % len(request.prompt)
    shown = {image.first: int(image.pixels[0, 0, 0]) for image in request.images}
    token = shown.get(at, request.prompt[at])
    if sampling.temperature and index == 0:
        token = ord("a") + sampling.seed32 % 26
    for biased, bias in sampling.logit_bias.items():
        token = biased if bias > 0 else token
    if index < sampling.min_tokens and token in sampling.stop_token_ids:
        return FILLER
    return token


def scores_of(request: Request) -> PromptLogprobs | None:
    """Returns prompt logprobs in the scheme of `logprob_of`; the ranks are the ids, from 1 on."""
    ids, count = np.array(request.prompt[1:], np.int32), request.sampling.prompt_logprobs
    if count is None or not len(ids):
        return None
    best = (ids[:, None] + np.arange(count, dtype=np.int32)) % VOCAB
    return PromptLogprobs(np.float32(-ids / 256), ids + 1, best, np.float32(-best / 256))


def logprob_of(token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Returns the logprob of a token, and those of the `count` best tokens."""
    best = [(token + i) % VOCAB for i in range(count)]
    return -token / 256, [(other, -other / 256) for other in best]
