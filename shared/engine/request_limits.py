"""Limits of requests that a backend implies.

The HTTP server uses `RequestLimits` without backends, and starts without their modules.
"""

from __future__ import annotations

from shared.boundary.backend import BackendLimits
from shared.boundary.program import ProgramFeature
from shared.engine.checks import RequestLimits


def request_limits(capacity: BackendLimits, max_request_tokens: int) -> RequestLimits:
    """Returns the limits that a backend's capacity implies."""
    has_logprobs = any(program.has(ProgramFeature.LOGPROBS) for program in capacity.programs)
    images = capacity.images
    return RequestLimits(
        context_length=capacity.context_length,
        max_request_tokens=max_request_tokens,
        vocab_size=capacity.vocab,
        max_stop_token_ids=capacity.max_stop_ids,
        max_logit_bias_entries=capacity.max_bias,
        max_logprobs=capacity.max_logprobs if has_logprobs else None,
        max_prompt_logprobs=capacity.max_scores,
        structured_outputs=any(program.has(ProgramFeature.MASK) for program in capacity.programs),
        image_token=None if images is None else images.vision.image_token,
        max_image_tokens=capacity.max_image_tokens,
    )
