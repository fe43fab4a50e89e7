"""Prompt of a request as the prefix cache identifies it, and its form in `POST /kv_transfer`."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

import numpy as np

from shared.engine.image_inputs import PromptImage
from shared.engine.request import CacheNamespace, Request

KEY_BYTES = 16
AFFINITY_TOKENS = 256
"""First tokens of a prompt that select its prefill server, which then has the prefix cached."""


@dataclass(frozen=True, eq=False)
class PromptKey:
    """Tokens, cache namespace and images of a prompt.

    Attributes:
      tokens: Prompt tokens.
      namespace: Cache namespace.
      images: Images of the prompt.
    """

    tokens: tuple[int, ...]
    namespace: CacheNamespace
    images: tuple[PromptImage, ...]

    @classmethod
    def of(cls, request: Request) -> Self:
        """Returns the prefix of a request."""
        return cls(request.prompt, request.namespace, request.images)

    @cached_property
    def key(self) -> bytes:
        """Digest of everything."""
        return _digest(self.namespace, self.tokens, self.images)

    @cached_property
    def affinity(self) -> bytes:
        """Digest of the beginning."""
        images = [image for image in self.images if image.first < AFFINITY_TOKENS]
        return _digest(self.namespace, self.tokens[:AFFINITY_TOKENS], images)

    def to_json(self) -> bytes:
        """Returns the body of `POST /kv_transfer`."""
        fields: dict[str, Any] = {"tokens": self.tokens, "tenant": self.namespace.tenant}
        if self.namespace.adapter:
            fields["lora_name"] = self.namespace.adapter
        if self.images:
            fields["images"] = list(map(_image_fields, self.images))
        return json.dumps(fields).encode()


def _digest(
    namespace: CacheNamespace, tokens: Sequence[int], images: Sequence[PromptImage]
) -> bytes:
    found = blake2b(json.dumps([namespace, len(tokens)]).encode(), digest_size=KEY_BYTES)
    found.update(np.array(tokens, np.int32).tobytes())
    for image in images:
        found.update(image.digest + image.first.to_bytes(8, "little"))
    return found.digest()


def _image_fields(image: PromptImage) -> dict[str, Any]:
    height, width, _ = image.pixels.shape
    pixels = base64.b64encode(np.ascontiguousarray(image.pixels).data).decode()
    return {"first": image.first, "height": height, "width": width, "pixels": pixels}
