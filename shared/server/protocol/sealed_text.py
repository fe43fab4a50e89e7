"""Opaque values that return reasoning to stateless clients.

A value is compressed, masked and authenticated text. All servers of a model with the same API key
read it. It is no secret: a client may request the reasoning as text as well.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import zlib

MAX_TEXT_BYTES = 1 << 22
_NONCE, _TAG = 12, 16
_VERSION = b"\x01"


class SealedText:
    """Seals and opens texts.

    Args:
      model: Served name of the model.
      api_key: Key of the server, or None.
    """

    def __init__(self, model: str, api_key: str | None) -> None:
        given = f"{model}\0{api_key or ''}".encode()
        self._key = hashlib.sha256(b"tandem reasoning\0" + given).digest()

    def seal(self, text: str) -> str:
        """Returns the opaque value of a text, as URL-safe base64."""
        nonce, packed = secrets.token_bytes(_NONCE), zlib.compress(text.encode())
        masked = _xor(packed, self._mask(nonce, len(packed)))
        head = _VERSION + nonce
        return base64.urlsafe_b64encode(head + self._tag(head + masked) + masked).decode()

    def open(self, value: str) -> str | None:
        """Returns the text of a value; None if another server has made it, or it was changed."""
        try:
            sealed = base64.urlsafe_b64decode(value.encode("ascii"))
        except ValueError:
            return None
        head, rest = sealed[: 1 + _NONCE], sealed[1 + _NONCE :]
        tag, masked = rest[:_TAG], rest[_TAG:]
        if not hmac.compare_digest(tag, self._tag(head + masked)):
            return None
        packed = _xor(masked, self._mask(head[1:], len(masked)))
        return zlib.decompressobj().decompress(packed, MAX_TEXT_BYTES).decode(errors="replace")

    def _mask(self, nonce: bytes, length: int) -> bytes:
        return hashlib.shake_256(self._key + nonce).digest(length)

    def _tag(self, given: bytes) -> bytes:
        return hmac.new(self._key, given, hashlib.sha256).digest()[:_TAG]


def _xor(given: bytes, mask: bytes) -> bytes:
    number = int.from_bytes(given, "big") ^ int.from_bytes(mask, "big")
    return number.to_bytes(len(given), "big")
