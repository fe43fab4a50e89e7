"""Validation of requests, used by both the HTTP server and the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shared.engine.image_inputs import PromptImage
from shared.engine.request import InvalidRequestError, SamplingParams

TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a request with too many tokens."""

NO_GRAMMARS = "structured output is off; start the server with --grammar-backend llguidance"

OWN_NAMES = {name: name for name in ("prompt", "max_tokens", "logprobs", "prompt_logprobs")}
"""Field names of the engine; an API may use other names in messages."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of a request.

    Attributes:
      context_length: Maximum tokens of a request, prompt and output together.
      max_request_tokens: The same, or less if the KV pages cannot hold a whole context.
      vocab_size: Vocabulary size; token ids are below it.
      max_stop_token_ids: Maximum number of stop tokens.
      max_logit_bias_entries: Maximum entries of `logit_bias`.
      max_logprobs: Maximum top logprobs per output token; None if logprobs are not enabled.
      max_prompt_logprobs: Maximum top logprobs per prompt token; 0 if prompt logprobs are not
        enabled.
      structured_outputs: True if structured output is supported.
      image_token: Placeholder token of images; None for a text-only model.
      max_image_tokens: Maximum image tokens of one image; 0 for a text-only model.
    """

    context_length: int
    max_request_tokens: int
    vocab_size: int
    max_stop_token_ids: int
    max_logit_bias_entries: int
    max_logprobs: int | None
    max_prompt_logprobs: int = 0
    structured_outputs: bool = False
    image_token: int | None = None
    max_image_tokens: int = 0

    @property
    def room(self) -> str:
        """Description of the token limit in messages."""
        if self.max_request_tokens < self.context_length:
            return f"the {self.max_request_tokens} tokens that the KV pages hold for one request"
        return f"the context of {self.context_length} tokens"


def check(
    prompt: Sequence[int],
    sampling: SamplingParams,
    limits: RequestLimits,
    names: Mapping[str, str] = OWN_NAMES,
    images: Sequence[PromptImage] = (),
) -> None:
    """Checks that a request is valid and supported.

    Args:
      prompt, sampling: Prompt and parameters of the request.
      limits: Limits of the model and the engine.
      names: Field names of the API, for messages.
      images: Images of the prompt.

    Raises:
      InvalidRequestError: The request is invalid or unsupported; names the field.
    """
    _check_prompt(prompt, limits, names["prompt"])
    _check_images(prompt, images, limits, names["prompt"])
    _check_length(len(prompt), sampling, limits, names["max_tokens"])
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            "min_tokens",
            f"min_tokens must not exceed {names['max_tokens']}, which is {sampling.max_tokens}",
        )
    _check_count("stop_token_ids", sampling.stop_token_ids, limits.max_stop_token_ids, "ids")
    check_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_count("logit_bias", sampling.logit_bias, limits.max_logit_bias_entries, "tokens")
    check_ids("logit_bias", sampling.logit_bias, limits.vocab_size)
    _check_logprobs(sampling.logprobs, limits.max_logprobs, names["logprobs"])
    _check_prompt_logprobs(sampling.prompt_logprobs, limits, names["prompt_logprobs"])
    if sampling.grammar is not None:
        _check_grammar(len(prompt), sampling, limits, names)
        if images and images[-1].end == len(prompt):
            name = names["prompt"]
            raise InvalidRequestError(
                name, f"{name} must not end with an image when structured output is requested"
            )


def _check_prompt(prompt: Sequence[int], limits: RequestLimits, name: str) -> None:
    if not prompt:
        raise InvalidRequestError(name, f"{name} must not be empty: it has no tokens")
    if len(prompt) >= limits.max_request_tokens:
        raise InvalidRequestError(
            name,
            f"{name} has {len(prompt)} tokens, which leaves no room for output within "
            f"{limits.room}",
            TOO_LONG,
        )
    check_ids(name, prompt, limits.vocab_size)


def _check_images(
    prompt: Sequence[int], images: Sequence[PromptImage], limits: RequestLimits, name: str
) -> None:
    """Checks that the image tokens of a prompt match its images."""
    if limits.image_token is None:
        if images:
            raise InvalidRequestError(
                name, f"{name} contains an image, but this server serves a text-only model"
            )
        return
    if not images and limits.image_token not in prompt:
        return
    for number, each in enumerate(images, start=1):
        if each.count > limits.max_image_tokens:
            raise InvalidRequestError(
                name,
                f"image {number} of {name} has {each.count} tokens, at most "
                f"{limits.max_image_tokens} are supported; send a smaller image",
            )
    if not _are_in_place(prompt, images, limits.image_token):
        raise InvalidRequestError(
            name,
            f"the image tokens ({limits.image_token}) of {name} do not match its "
            f"{len(images)} images; text must not contain the image token",
        )


def _are_in_place(prompt: Sequence[int], images: Sequence[PromptImage], image_token: int) -> bool:
    """Returns True if the image tokens of a prompt are those of its images, in order."""
    end = 0
    for each in images:
        if each.first < end or prompt[each.first : each.end].count(image_token) != each.count:
            return False
        end = each.end
    return prompt.count(image_token) == sum(each.count for each in images)


def _check_length(
    prompt_tokens: int, sampling: SamplingParams, limits: RequestLimits, name: str
) -> None:
    asked = sampling.max_tokens
    if asked < 0:
        raise InvalidRequestError(name, f"{name} must be at least 0, got {asked}")
    if prompt_tokens + asked > limits.max_request_tokens:
        raise InvalidRequestError(
            name,
            f"the prompt has {prompt_tokens} tokens and {name} is {asked!s:.40}: together more "
            f"than {limits.room}",
            TOO_LONG,
        )


def _check_count(name: str, entries: Collection[int], most: int, noun: str) -> None:
    if len(entries) > most:
        raise InvalidRequestError(
            name, f"{name} must have at most {most} {noun}, got {len(entries)}"
        )


def check_ids(name: str, ids: Collection[int], vocab: int) -> None:
    """Checks that token ids are in the vocabulary.

    Raises:
      InvalidRequestError: Names the field, the first invalid id and the valid range.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise InvalidRequestError(
            name, f"{name} contains token id {wrong!s:.40}; valid ids are 0 to {vocab - 1}"
        )


def _check_logprobs(asked: int | None, most: int | None, name: str) -> None:
    if asked is None:
        return
    if most is None:
        raise InvalidRequestError(name, f"{name} is not supported: logprobs are off on this server")
    if not 0 <= asked <= most:
        raise InvalidRequestError(name, f"{name} must be 0 to {most}, got {asked!s:.40}")


def _check_prompt_logprobs(asked: int | None, limits: RequestLimits, name: str) -> None:
    if asked is None:
        return
    most = limits.max_prompt_logprobs
    if not most:
        raise InvalidRequestError(
            name,
            f"{name} requests logprobs of the prompt; start the server with "
            f"--max-prompt-logprobs {max(asked, 1)!s:.40} or more",
        )
    if not 0 <= asked <= most:
        raise InvalidRequestError(
            name,
            f"{name} must be 0 to {most} for logprobs of the prompt "
            f"(--max-prompt-logprobs), got {asked!s:.40}",
        )


def _check_grammar(
    prompt_tokens: int, sampling: SamplingParams, limits: RequestLimits, names: Mapping[str, str]
) -> None:
    if not limits.structured_outputs:
        raise InvalidRequestError("grammar", NO_GRAMMARS)
    if prompt_tokens < 2:
        # A decode step samples the first token, starting from the prompt's last one.
        name = names["prompt"]
        raise InvalidRequestError(
            name, f"{name} must have at least 2 tokens when structured output is requested"
        )
    if not sampling.max_tokens:
        name = names["max_tokens"]
        raise InvalidRequestError(
            name, f"{name} must be at least 1 when structured output is requested"
        )
