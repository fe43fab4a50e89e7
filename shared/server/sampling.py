"""How the tokens of a request are chosen: an API's fields in the engine's words."""

from __future__ import annotations

from shared.engine.checks import RequestLimits
from shared.engine.request import SamplingParams
from shared.server.openai_types import GenerationRequest

# Below it a temperature is greedy: logits over it would leave float32's range.
MIN_TEMPERATURE = 1e-5
# Keeps one token like every smaller top_p, but is not rounded to 0, which would keep none.
MIN_TOP_P = 1e-6


def make_sampling(
    request: GenerationRequest, prompt_tokens: int, limits: RequestLimits, ends: tuple[int, ...]
) -> SamplingParams:
    """Sampling parameters, but for the seeds, which each choice has of its own.

    Whether they can be served is for `shared.engine.checks.check` to say.

    Args:
      request: What was asked.
      prompt_tokens: Tokens of the prompt; an output without a bound takes the room behind them.
      limits: Bounds of the model and the engine.
      ends: Tokens that end a text unless the request ignores them.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    repetition = request.repetition_penalty
    top_k = request.top_k or 0
    own = () if request.ignore_eos else ends
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(top_p, MIN_TOP_P),
        top_k=top_k if 0 < top_k < limits.vocab else None,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        max_tokens=_max_tokens(request, limits.max_request_tokens - prompt_tokens),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys((*own, *(request.stop_token_ids or [])))),
        logit_bias=request.logit_bias,
        logprobs=request.asked_logprobs[1],
        max_draft_tokens=request.most_drafts,
    )


def _max_tokens(request: GenerationRequest, room: int) -> int:
    _, asked = request.asked_tokens
    if asked is not None:
        return asked
    return room if request.DEFAULT_TOKENS is None else min(room, request.DEFAULT_TOKENS)
