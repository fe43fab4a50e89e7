"""How the tokens of an answer are chosen, as Python code says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from shared.text.grammar_worker import Form
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
"""The lowest and highest value of each field: those of the HTTP routes."""

_WHOLE = {"n", "top_k", "seed"} | {name for name in BOUNDS if "tokens" in name or "logp" in name}
_ABOVE = {"top_p"}  # their lowest value is none itself
_BIAS = 100  # of a token, either way


def _is_some_text(value: Any) -> bool:
    return is_text(value) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_some_text, value))


class _Kind(NamedTuple):
    """A kind of form: its own name, what its value is, and whether a value is that."""

    name: str
    noun: str
    takes: Callable[[Any], bool]


_FORMS = {
    "json": _Kind("schema", "an object", lambda value: isinstance(value, dict)),
    "regex": _Kind("regex", "a text", _is_some_text),
    "choice": _Kind("choice", "a list of texts", _are_texts),
    "grammar": _Kind("lark", "a text", _is_some_text),
}


@dataclass(kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen; the fields are those of the HTTP routes.

    Attributes:
      n: Answers of each prompt.
      temperature, top_p, top_k, min_p, repetition_penalty: None leaves them to the model's
        generation_config.json.
      max_tokens: Most tokens of an answer; None: all that fit, 0: the prompt is read and that is
        all.
      min_tokens: No token that ends the text, and no stop string, counts before.
      seed: Equal seeds give equal texts; None draws one.
      stop: Strings that end the text and are none of it.
      stop_token_ids: Tokens that end the text, beside the model's own.
      ignore_eos: The model's own end tokens end nothing.
      logit_bias: Added to the logits, by token.
      logprobs: How many of the best tokens come with each token; None: no logprobs.
      prompt_logprobs: The same of the prompt's tokens.
      max_draft_tokens: Most drafts of a step; 0 turns speculation off for this request.
      structured_outputs: Holds the answer to a form: one of json (a schema), regex, choice and
        grammar (Lark or GBNF).
      trace: The result tells of every step.

    Raises:
      ValueError: A field is out of its bounds; one sentence that names it.
    """

    DEFAULT_TOKENS: ClassVar[int | None] = None

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
    trace: bool | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            is_in = _is_number(value, name in _WHOLE, low, high)
            if value is not None and (not is_in or (name in _ABOVE and value == low)):
                noun = "a whole number" if name in _WHOLE else "a number"
                begin = "above" if name in _ABOVE else "from"
                reason = f"must be {noun} {begin} {low} to {high}, got {value!r:.60}"
                raise ValueError(f"{name} {reason}")
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop, self.logit_bias = self.stop or [], self.logit_bias or {}
        for name in ("ignore_eos", "trace"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ValueError(f"{name} must be true or false, got {value!r:.60}")
        if self.stop and not _are_texts(self.stop):
            raise ValueError("stop must be a list of texts, none of them empty")
        if not all(_is_number(each, True, 0, _MOST) for each in self.stop_token_ids or ()):
            raise ValueError("stop_token_ids must be a list of token ids")
        if not all(_is_number(each, True, 0, _MOST) for each in self.logit_bias):
            raise ValueError("logit_bias must have token ids as its keys")
        if not all(_is_number(each, False, -_BIAS, _BIAS) for each in self.logit_bias.values()):
            raise ValueError(f"logit_bias must have numbers from -{_BIAS} to {_BIAS}")
        _ = self.form  # what cannot be read is refused here, not at the first prompt

    @property
    def form(self) -> Form | None:
        """What the answer is held to."""
        if self.structured_outputs is None:
            return None
        given = self.structured_outputs
        if not isinstance(given, dict) or len(given) != 1 or not given.keys() <= _FORMS.keys():
            raise ValueError(f"structured_outputs must have one of {', '.join(_FORMS)}")
        ((name, value),) = given.items()
        kind = _FORMS[name]
        if not kind.takes(value):
            raise ValueError(f"structured_outputs: {name} must be {kind.noun}, got {value!r:.60}")
        return Form(kind=kind.name, value=value)

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for the best tokens, and how many."""
        return "logprobs", self.logprobs

    @property
    def asked_prompt_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for logprobs of the prompt, and how many."""
        return "prompt_logprobs", self.prompt_logprobs

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step."""
        return self.max_draft_tokens


def _is_number(value: Any, is_whole: bool, low: float, high: float) -> bool:
    """Whether a value is a number within bounds; true and false are none."""
    kinds = (int,) if is_whole else (int, float)
    return type(value) in kinds and low <= value <= high
