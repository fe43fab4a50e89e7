"""Conversion of API fields to the engine's sampling parameters."""

from __future__ import annotations

from shared.engine.request import SamplingParams
from shared.process.ipc_messages import ServerInfo
from shared.server.protocol.sampling_fields import SamplingFields

# Lower temperatures are greedy: dividing logits by them would exceed the range of float32.
MIN_TEMPERATURE = 1e-5
# Keeps one token, same as every smaller top_p, but is not rounded to 0, which would keep none.
MIN_TOP_P = 1e-6


def make_sampling(request: SamplingFields, prompt_tokens: int, facts: ServerInfo) -> SamplingParams:
    """Returns the sampling parameters without seeds, which differ between choices.

    `shared.engine.checks.check` validates them.

    Args:
      request: Sampling fields of the request.
      prompt_tokens: Tokens of the prompt; without `max_tokens` the output may fill the rest of the
        context.
      facts: Limits, end tokens and defaults of the model.
    """
    limits, default = facts.limits, facts.sampling_defaults
    temperature = _value(request.temperature, default.temperature)
    top_k = _value(request.top_k, default.top_k)
    eos_ids = () if request.ignore_eos else facts.eos_ids
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(_value(request.top_p, default.top_p), MIN_TOP_P),
        top_k=int(top_k) if 0 < top_k < limits.vocab_size else None,
        min_p=_value(request.min_p, default.min_p),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_value(request.repetition_penalty, default.repetition_penalty),
        max_tokens=_max_tokens(request, limits.max_request_tokens - prompt_tokens),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(dict.fromkeys((*eos_ids, *(request.stop_token_ids or [])))),
        logit_bias=request.logit_bias,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        max_draft_tokens=request.max_drafts,
        traces=facts.trace_all_requests or request.returns_trace,
    )


def _value(given: float | None, default: float) -> float:
    return default if given is None else given


def _max_tokens(request: SamplingFields, room: int) -> int:
    given = request.max_tokens
    if given is not None:
        return min(given, room) if request.is_clamped and room > 0 else given
    return room if request.default_tokens is None else min(room, request.default_tokens)
