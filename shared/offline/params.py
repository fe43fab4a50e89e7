"""Sampling parameters of the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from shared.offline.values import as_json, items_of, number, token_ids, truth, whole_number
from shared.server.protocol.sampling_fields import SAME_NAMES, SamplingFields
from shared.text.grammar_worker import OutputFormat
from shared.text.tokenizer import is_text

_MOST = (1 << 31) - 1
BOUNDS = {
    "n": (1, 128),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, _MOST),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 2),
    "max_tokens": (0, _MOST),
    "min_tokens": (0, _MOST),
    "logprobs": (0, _MOST),
    "prompt_logprobs": (0, _MOST),
    "max_draft_tokens": (0, 1 << 16),
    "seed": (-(1 << 63), (1 << 63) - 1),
}
"""Lowest and highest value of each field, the same as in the HTTP routes."""

_WHOLE = {"n", "top_k", "seed"} | {name for name in BOUNDS if "tokens" in name or "logp" in name}
_ABOVE = {"top_p"}  # fields whose lowest value is excluded
_BIAS = 100  # largest absolute value
_FORMS = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""Kind of grammar of each field of `structured_outputs`."""


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters; the fields are those of the HTTP routes.

    Attributes:
      n: Number of outputs of each prompt.
      temperature, top_p, top_k, min_p, repetition_penalty: None selects the value of the model's
        generation_config.json.
      presence_penalty, frequency_penalty: Penalties as in OpenAI's API.
      max_tokens: Most tokens of an output; None: up to the context length; 0: prefill only.
      min_tokens: Number of tokens before stop tokens and stop strings take effect.
      seed: Seed of the sampling noise, for reproducible outputs; None: a random seed.
      stop: Stop strings, which are removed from the output.
      stop_token_ids: Stop tokens in addition to the model's end tokens.
      ignore_eos: Disables the model's end tokens.
      logit_bias: Bias added to the logits, by token id.
      logprobs: Number of top tokens with logprobs for each output token; None: no logprobs.
      prompt_logprobs: Number of top tokens with logprobs for each prompt token.
      max_draft_tokens: Most draft tokens of a step; 0 disables speculation for this request.
      structured_outputs: Constraint of the output: one of json (a schema), regex, choice and
        grammar (Lark or GBNF).
      return_trace: Adds a trace of every step to the result.
      lora: Name of the LoRA adapter, one of the option lora_paths; None for the base model.

    Raises:
      ValueError: A field is invalid; one sentence that names the field.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_draft_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None
    return_trace: bool | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        self.n = 1 if self.n is None else self.n
        for name in BOUNDS:
            setattr(self, name, _bounded(name, getattr(self, name)))
        for name in ("ignore_eos", "return_trace"):
            if (value := getattr(self, name)) is not None and truth(value) is None:
                raise ValueError(f"{name} must be true or false, got {value!r:.60}")
            setattr(self, name, None if value is None else truth(value))
        if self.stop is None or isinstance(self.stop, str):
            self.stop = [] if self.stop is None else [self.stop]
        if (stop := _texts(self.stop)) is None:
            raise ValueError(f"stop must be a list of non-empty strings, got {self.stop!r:.60}")
        self.stop = stop
        if self.stop_token_ids is not None:
            self.stop_token_ids = _stop_token_ids(self.stop_token_ids)
        if self.lora is not None and not is_text(self.lora):
            raise ValueError(f"lora must be the name of an adapter, got {self.lora!r:.60}")
        self.logit_bias = _bias({} if self.logit_bias is None else self.logit_bias)
        if self.structured_outputs is not None:
            self.structured_outputs = _structured(self.structured_outputs)

    @property
    def form(self) -> OutputFormat | None:
        """Constraint of the output; None if it is unconstrained."""
        if self.structured_outputs is None:
            return None
        ((name, value),) = self.structured_outputs.items()
        return OutputFormat(kind=_FORMS[name], value=value)

    @property
    def fields(self) -> SamplingFields:
        """Sampling fields in the form that requests share."""
        return SamplingFields(
            **{name: getattr(self, name) for name in SAME_NAMES},
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            max_drafts=self.max_draft_tokens,
            returns_trace=bool(self.return_trace),
        )


def _bounded(name: str, value: Any) -> int | float | None:
    """Returns the number of a field after checking its bounds."""
    if value is None:
        return None
    low, high = BOUNDS[name]
    found = whole_number(value) if name in _WHOLE else number(value)
    if found is None or not low <= found <= high or (name in _ABOVE and found == low):
        noun = "a whole number" if name in _WHOLE else "a number"
        begin = "above" if name in _ABOVE else "from"
        reason = f"must be {noun} {begin} {low} to {high}, got {value!r:.60}"
        raise ValueError(f"{name} {reason}")
    return found


def _listed(value: Any) -> list[Any] | None:
    """Returns the items of a list, or of a set in sorted order."""
    return sorted(value, key=str) if isinstance(value, Set) else items_of(value)


def _texts(value: Any) -> list[str] | None:
    """Returns a list of non-empty strings; None for anything else."""
    items = _listed(value)
    return list(map(str, items)) if items is not None and all(map(_is_some_text, items)) else None


def _is_some_text(value: Any) -> bool:
    return is_text(value) and bool(value)


def _stop_token_ids(value: Any) -> list[int]:
    ids = token_ids(_listed(value))
    if ids is None or not all(0 <= each <= _MOST for each in ids):
        raise ValueError(f"stop_token_ids must be a list of token ids, got {value!r:.60}")
    return ids


def _bias(given: Any) -> dict[int, float]:
    """Returns the bias of each token."""
    if not isinstance(given, Mapping):
        raise ValueError(f"logit_bias must be a mapping from token ids, got {given!r:.60}")
    found = {}
    for key, value in given.items():
        token, bias = whole_number(key), number(value)
        if token is None or not 0 <= token <= _MOST:
            raise ValueError(f"logit_bias must have token ids as its keys, got {key!r:.60}")
        if bias is None or not -_BIAS <= bias <= _BIAS:
            raise ValueError(
                f"logit_bias must have numbers from -{_BIAS} to {_BIAS}, got {value!r:.60}"
            )
        if found.setdefault(token, bias) != bias:
            raise ValueError(f"logit_bias has token {token} twice")
    return found


def _structured(given: Any) -> dict[str, Any]:
    """Returns the field of a constraint and its value, converted to JSON types."""
    if not isinstance(given, Mapping) or len(given) != 1 or not given.keys() <= _FORMS.keys():
        raise ValueError(f"structured_outputs must have one of {', '.join(_FORMS)}")
    ((name, value),) = given.items()
    if name == "json":
        noun = "an object"
        found = as_json(value, "structured_outputs: json") if isinstance(value, Mapping) else None
    elif name == "choice":
        noun, found = "a list of strings", _texts(value) or None
    else:
        noun, found = "a string", str(value) if _is_some_text(value) else None
    if found is None:
        raise ValueError(f"structured_outputs: {name} must be {noun}, got {value!r:.60}")
    return {name: found}
