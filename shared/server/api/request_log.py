"""Log line for each finished request."""

from __future__ import annotations

from shared.process import logs
from shared.server.engine_link.request_end import RequestSummary
from shared.text.tokenizer import Tokenizer

MAX_CHARACTERS = 8192
"""Maximum characters of a logged prompt and of each logged output."""


class RequestLog:
    """Observer that logs one line for each finished request.

    Args:
      tokenizer: Decodes outputs; None: token ids are logged.
      logs_texts: Log the request body and the outputs (`--log-requests`).
    """

    def __init__(self, tokenizer: Tokenizer | None, logs_texts: bool) -> None:
        self._tokenizer, self._tells_texts = tokenizer, logs_texts

    def on_request_end(self, end: RequestSummary) -> None:
        """Logs a finished request."""
        first = end.first_token_s
        texts = self._texts(end) if self._tells_texts else {}
        ignored = {"ignored": ",".join(end.ignored)} if end.ignored else {}
        logs.info(
            "request ended",
            id=end.request_id,
            endpoint=end.endpoint,
            finish_reason=",".join(dict.fromkeys(end.finish_reasons)),
            choices=len(end.finish_reasons),
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            output_tokens=end.output_tokens,
            accept_length=round(end.accept_length, 3),
            ttft_s=None if first is None else round(first, 6),
            e2e_s=round(end.total_s, 6),
            **ignored,
            **texts,
        )

    def _texts(self, end: RequestSummary) -> dict[str, object]:
        outputs = [
            self._tokenizer.decode(list(tokens)) if self._tokenizer else str(list(tokens))
            for tokens in end.outputs
        ]
        return {
            "request": end.request.model_dump_json(exclude_unset=True)[:MAX_CHARACTERS],
            "outputs": [text[:MAX_CHARACTERS] for text in outputs],
        }
