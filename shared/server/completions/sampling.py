"""Conversion of API fields to the engine's sampling parameters."""

from __future__ import annotations

from typing import ClassVar, Protocol

from shared.engine.request import SamplingParams
from shared.process.ipc_messages import ServerInfo

# Below it a temperature is greedy: logits over it would leave float32's range.
MIN_TEMPERATURE = 1e-5
# Keeps one token like every smaller top_p, but is not rounded to 0, which would keep none.
MIN_TOP_P = 1e-6


class Asked(Protocol):
    """The fields of a request that say how tokens are chosen; None leaves one to the model.

    `DEFAULT_TOKENS` bounds an output whose request does not say; None: all that fits.
    """

    DEFAULT_TOKENS: ClassVar[int | None]
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    min_tokens: int | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    logit_bias: dict[int, float]

    @property
    def wants_trace(self) -> bool:
        """True if the request asks for a trace of its steps."""
        ...

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        ...

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for the best tokens, and how many; None for no logprobs at all."""
        ...

    @property
    def asked_prompt_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for most of the prompt's logprobs, and how many; None for none."""
        ...

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step, or None for all that the step has."""
        ...


def make_sampling(request: Asked, prompt_tokens: int, facts: ServerInfo) -> SamplingParams:
    """Sampling parameters, but for the seeds, which each choice has of its own.

    Whether they can be served is for `shared.engine.checks.check` to say.

    Args:
      request: What was asked.
      prompt_tokens: Tokens of the prompt; an output without a bound takes the room behind them.
      facts: Bounds, ends of a text, and what holds where the request leaves a field open.
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
        logprobs=request.asked_logprobs[1],
        prompt_logprobs=request.asked_prompt_logprobs[1],
        max_draft_tokens=request.most_drafts,
        traces=facts.trace_all_requests or request.wants_trace,
    )


def _value(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _max_tokens(request: Asked, room: int) -> int:
    _, asked = request.asked_tokens
    if asked is not None:
        return asked
    return room if request.DEFAULT_TOKENS is None else min(room, request.DEFAULT_TOKENS)
