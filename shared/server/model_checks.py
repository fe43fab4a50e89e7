"""Checks of a request against the model: what fits, which tokens exist, how they are chosen."""

from __future__ import annotations

from collections.abc import Collection

from shared.engine.request import SamplingParams
from shared.process.frames import ModelFacts
from shared.server.openai_types import ApiError, GenerationRequest
from shared.server.tokenizer import Tokenizer

# Below it a temperature is greedy: logits over it would leave float32's range.
MIN_TEMPERATURE = 1e-5
# Keeps one token like every smaller top_p, but is not rounded to 0, which would keep none.
MIN_TOP_P = 1e-6


def check_length(text: str, param: str, tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """Checks a prompt's text before the time is spent that encoding takes.

    Raises:
      ApiError: It has more tokens than fit, whatever they are.
    """
    if not tokenizer.can_fit(text, facts.max_request_tokens):
        message = f"{param} has {len(text)} characters, more than fit into {_room(facts)}"
        raise ApiError(400, message, param, "context_length_exceeded")


def check_prompt(tokens: list[int], param: str, facts: ModelFacts) -> None:
    """Checks a prompt's tokens against the model.

    Raises:
      ApiError: It is empty, has an unknown token, or leaves no room in the context.
    """
    if not tokens:
        raise ApiError(400, f"{param} must not be empty: it has no tokens", param)
    if len(tokens) >= facts.max_request_tokens:
        raise ApiError(
            400,
            f"{param} has {len(tokens)} tokens, which leaves no room for an answer within "
            f"{_room(facts)}",
            param,
            "context_length_exceeded",
        )
    _check_ids(tokens, param, facts)


def _check_ids(ids: Collection[int], param: str, facts: ModelFacts) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < facts.vocab:
        wrong = next(token for token in ids if not 0 <= token < facts.vocab)
        message = f"{param} has token id {wrong!s:.40}, ids are 0 to {facts.vocab - 1}"
        raise ApiError(400, message, param)


def _room(facts: ModelFacts) -> str:
    if facts.max_request_tokens < facts.context_length:
        return f"the {facts.max_request_tokens} tokens that the KV pages hold for one request"
    return f"the context of {facts.context_length} tokens"


def make_sampling(request: GenerationRequest, prompt: int, facts: ModelFacts) -> SamplingParams:
    """How tokens are chosen, but for the seeds, which each choice has of its own.

    Args:
      request: What was asked.
      prompt: Tokens of the prompt, as `check_prompt` passed it.
      facts: Bounds of the model and the engine.

    Raises:
      ApiError: The output does not fit, or a field is beyond what model and engine have.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    repetition = request.repetition_penalty
    top_k = request.top_k or 0
    max_tokens = _max_tokens(request, prompt, facts)
    return SamplingParams(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(top_p, MIN_TOP_P),
        top_k=top_k if 0 < top_k < facts.vocab else None,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        stop_token_ids=_stop_token_ids(request, facts),
        logit_bias=_logit_bias(request, facts),
        logprobs=_num_logprobs(request, facts),
        max_draft_tokens=request.most_drafts,
    )


def _max_tokens(request: GenerationRequest, prompt: int, facts: ModelFacts) -> int:
    room = facts.max_request_tokens - prompt
    name, asked = request.asked_tokens
    if asked is None:
        return room if request.DEFAULT_TOKENS is None else min(room, request.DEFAULT_TOKENS)
    if asked > room:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and {name} is {asked!s:.40}: together more than "
            f"{_room(facts)}",
            name,
            "context_length_exceeded",
        )
    return asked


def _stop_token_ids(request: GenerationRequest, facts: ModelFacts) -> tuple[int, ...]:
    given = request.stop_token_ids or []
    own = () if request.ignore_eos else facts.eos_ids
    ids = tuple(dict.fromkeys((*own, *given)))
    if len(ids) > facts.max_stop_ids:
        room = facts.max_stop_ids - len(own)
        raise ApiError(400, f"stop_token_ids may have at most {room} ids", "stop_token_ids")
    _check_ids(given, "stop_token_ids", facts)
    return ids


def _logit_bias(request: GenerationRequest, facts: ModelFacts) -> dict[int, float]:
    if len(request.logit_bias) > facts.max_bias:
        raise ApiError(400, f"logit_bias may have at most {facts.max_bias} tokens", "logit_bias")
    _check_ids(request.logit_bias, "logit_bias", facts)
    return request.logit_bias


def _num_logprobs(request: GenerationRequest, facts: ModelFacts) -> int | None:
    name, asked = request.asked_logprobs
    if asked is not None and asked > facts.max_logprobs:
        message = f"{name} must be from 0 to {facts.max_logprobs}, got {asked!s:.40}"
        raise ApiError(400, message, name)
    return asked
