"""IPC messages between engine process and HTTP server, and their framing on the socket.

A frame is a 4-byte little-endian length and a msgpack list whose first entry names the message.

- engine to server: `facts` (a `ServerInfo`), `step` (rows of one step), `refused` (id, message,
  field or None), `metrics` (a snapshot; sent at the start and about once per second as a heartbeat,
  and on request), `reply` (ticket, named corpora or adapters, and message and field of an
  error), `drain`
  (maximum seconds), `kv_ticket` (id, fields of the ticket of the next part or None, and reason and
  message of an error), `end` (message, True for a failure).
- server to engine: `add` (prompt, sampling, [id, seed32] per choice, tenant, priority, images),
  `abort` (id), `finish` (id, final token count), `metrics`, `corpus_add` (ticket, name, int32
  tokens), `corpus_remove` (ticket, name), `corpus_list` (ticket), `lora_load` (ticket, name,
  folder), `lora_unload` (ticket, name), `kv_transfer` (fields of `add`; a `kv_ticket` for each
  part follows), `drained` (all responses are sent).

The pixels of an `add` are not part of its frame, because packing a large frame blocks everything
else. They are sent before it, per image: a frame `bytes` (their number), and then those bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from jaxtyping import UInt8

from shared.engine.checks import RequestLimits
from shared.engine.image_inputs import PromptImage
from shared.engine.request import Event, FinishReason, Request, SamplingParams, StepTrace
from shared.models.image_processor import ImageProcessorConfig
from shared.models.sampling import SamplingDefaults
from shared.options.flags import NONE
from shared.options.observing import ObservingOptions
from shared.spec.logprobs import PromptLogprobs
from shared.text.call_formats.registry import marks_of
from shared.text.tokenizer import Tokenizer

_LENGTH = struct.Struct("<I")

DEFAULT_NAME = "default"
"""Name of any served model in requests."""

BYTES = "bytes"
"""Name of the frame that is followed by raw bytes."""


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """Properties of model and engine that the server needs to check requests.

    Attributes:
      model_name: Served name of the model.
      model_folder: Absolute path of the checkpoint, which contains the tokenizer.
      limits: Limits of a request.
      eos_ids: EOS tokens from the model's config; the tokenizer may add one.
      sampling_defaults: Defaults of omitted sampling fields.
      max_open_requests: Maximum running and waiting requests; None for no limit.
      max_draft_depth: S, the maximum draft tokens that a step can accept; 0 without speculation.
      host_names: Accepted host names besides the machine's own; None for any.
      admin_api_key: Key of the admin routes; None disables them.
      corpus_path: JSONL file of the initial external corpus, or None.
      api_key: Key that all requests require; None for none.
      chat_template: Jinja file that replaces the folder's templates, or None.
      reasoning_parser: Parser of reasoning; None if outputs are not parsed for it.
      tool_call_parser: Parser of tool calls; None if tools are not supported.
      drafter: Speculative algorithm as in its flag; None without speculation.
      trace_all_requests: True to trace all requests, not only those that request it.
      store_responses: True to store responses of the Responses API for later requests.
      strict_fields: True to reject requests with fields that have no effect.
      admin_host_names: Same as `host_names`, for the admin listener.
      allowed_origins: Origins whose pages may read responses (CORS); `*` for any.
      observing: Options of logs, metrics and traces.
      ranks: Number of tensor-parallel ranks.
      silence_s: Seconds without a message after which the engine counts as frozen.
      images: Image processor config; None for a text-only model.
      disaggregation_mode: Role in disaggregated prefill, same as the flag.
      serves_kv_transfer: True if other servers may request KV cache.
      transfer_secret: Secret that they send; None if they need none.
      adapters: Folder of each LoRA adapter by its name; the server updates it in place.
    """

    model_name: str
    model_folder: str
    limits: RequestLimits
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    max_open_requests: int | None
    max_draft_depth: int
    host_names: tuple[str, ...] | None
    admin_api_key: str | None = None
    corpus_path: str | None = None
    api_key: str | None = None
    chat_template: str | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    drafter: str | None = None
    trace_all_requests: bool = False
    store_responses: bool = False
    strict_fields: bool = False
    admin_host_names: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    observing: ObservingOptions = field(default_factory=ObservingOptions)
    ranks: int = 1
    silence_s: float = math.inf
    images: ImageProcessorConfig | None = None
    disaggregation_mode: str = NONE
    serves_kv_transfer: bool = False
    transfer_secret: str | None = None
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[str, ...]:
        """Delimiters that outputs contain even if they are special tokens of the tokenizer."""
        return marks_of(self.tool_call_parser, self.reasoning_parser)

    def tokenizer(self) -> Tokenizer | None:
        """Reads the model's tokenizer with its chat template, for display of outputs.

        Raises:
          ValueError: A file is invalid.
        """
        return Tokenizer.from_folder(
            self.model_folder, self.marks, self.chat_template, self.tool_call_parser
        )

    def with_end(self, end_id: int | None) -> ServerInfo:
        """Adds the tokenizer's EOS token, if it has one, to the EOS tokens.

        The EOS token of a fine-tuned chat model is often only in tokenizer_config.json, while
        config.json still names the base model's. Only the server reads the tokenizer; the engine
        receives all EOS tokens with each request.
        """
        if end_id is None or end_id >= self.limits.vocab_size or end_id in self.eos_ids:
            return self
        return replace(self, eos_ids=(*self.eos_ids, end_id))

    def to_message(self) -> list[Any]:
        """Returns the first message of the engine process: its name, and all facts by name."""
        return ["facts", asdict(self)]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ServerInfo:
        """Restores the facts from the fields of `to_message`."""
        limits = RequestLimits(**fields["limits"])
        defaults = SamplingDefaults(**fields["sampling_defaults"])
        eos_ids = tuple(fields["eos_ids"])
        parts: dict[str, Any] = {
            "limits": limits,
            "sampling_defaults": defaults,
            "eos_ids": eos_ids,
        }
        for name in ("host_names", "admin_host_names"):
            parts[name] = None if fields[name] is None else tuple(fields[name])
        parts["allowed_origins"] = tuple(fields["allowed_origins"])
        parts["observing"] = ObservingOptions(**fields["observing"])
        if (config := fields["images"]) is not None:
            lists = {name: tuple(config[name]) for name in ("mean", "deviation")}
            parts["images"] = ImageProcessorConfig(**{**config, **lists})
        return cls(**{**fields, **parts})


def pack(message: list[Any]) -> bytes:
    """Returns a frame: the length in bytes, then the message as MessagePack."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack(message)
    body = packer.getbuffer()
    return b"".join((_LENGTH.pack(len(body)), body))


def in_parts(message: list[Any], pixels: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yields a message preceded by byte arrays that belong to it, without copying these."""
    for each in pixels:
        yield pack([BYTES, each.nbytes])
        yield np.ascontiguousarray(each).reshape(-1).data
    yield pack(message)


class FrameReader:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._pixels: list[UInt8[np.ndarray, " n"]] = []  # for the next message
        self._num_filled = 0  # of the last entry

    @property
    def is_within(self) -> bool:
        """True if a message has arrived in part."""
        return bool(self._bytes or self._pixels)

    def feed(self, received: bytes) -> Iterator[list[Any]]:
        """Yields each complete message, with its raw bytes as the last entry."""
        self._bytes += received
        while self._fill() and (message := self._cut()) is not None:
            if message[0] == BYTES:
                self._pixels.append(np.empty(message[1], np.uint8))
                self._num_filled = 0
                continue
            pixels, self._pixels = self._pixels, []
            yield [*message, pixels] if pixels else message

    def _fill(self) -> bool:
        """Moves received bytes to the pending raw bytes; returns True if they are complete."""
        if not self._pixels:
            return True
        left = self._pixels[-1][self._num_filled :]
        count = min(len(left), len(self._bytes))
        with memoryview(self._bytes) as held:
            left[:count] = held[:count]
        del self._bytes[:count]
        self._num_filled += count
        return count == len(left)

    def _cut(self) -> list[Any] | None:
        """Returns the next frame if it is complete."""
        if len(self._bytes) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        with memoryview(self._bytes) as held, held[_LENGTH.size : end] as body:
            message = msgpack.unpackb(body, strict_map_key=False)
        del self._bytes[:end]
        return message


def event_to_row(event: Event) -> list[Any]:
    """Converts an event to a row of a `step` message."""
    reason = event.finish_reason.value if event.finish_reason else None
    logprobs = event.logprobs
    values = [event.request_id, event.tokens, event.accepted, reason, event.error, logprobs]
    return [*values, event.cached_tokens, event.step, _scores_to_field(event.scores)]


def event_from_row(row: list[Any]) -> Event:
    """Restores an event from a row."""
    request_id, tokens, accepted, reason, error, logprobs, cached, step, scores = row
    if logprobs is not None:
        logprobs = [(chosen, [tuple(pair) for pair in best]) for chosen, best in logprobs]
    finish_reason = FinishReason(reason) if reason else None
    trace = None if step is None else StepTrace(*step)
    ended = (finish_reason, error, logprobs, cached, trace, _scores_from_field(scores))
    return Event(request_id, tokens, accepted, *ended)


def _scores_to_field(scores: PromptLogprobs | None) -> list[bytes] | None:
    """Converts prompt logprobs to bytes, because those of a long prompt are many numbers."""
    return None if scores is None else [np.ascontiguousarray(part).tobytes() for part in scores]


def _scores_from_field(parts: list[bytes] | None) -> PromptLogprobs | None:
    if parts is None:
        return None
    kinds = (np.float32, np.int32, np.int32, np.float32)
    chosen, ranks, *best = map(np.frombuffer, parts, kinds)
    return PromptLogprobs(chosen, ranks, *(part.reshape(len(chosen), -1) for part in best))


def sampling_to_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Converts sampling parameters to fields; the seeds of the choices are sent separately."""
    return asdict(sampling)


def sampling_from_fields(fields: dict[str, Any], seed32: int) -> SamplingParams:
    """Restores sampling parameters, with the seed of one choice."""
    stops = tuple(fields["stop_token_ids"])
    return SamplingParams(**{**fields, "seed32": seed32, "stop_token_ids": stops})


def image_to_field(image: PromptImage) -> list[Any]:
    """Converts an image to a field without its pixels."""
    return [image.first, image.grid, image.pixels.shape, image.digest]


def image_from_field(field: list[Any], pixels: UInt8[np.ndarray, " n"]) -> PromptImage:
    """Restores an image from its field and pixels."""
    first, grid, shape, digest = field
    return PromptImage(first=first, grid=tuple(grid), pixels=pixels.reshape(shape), digest=digest)


def requests_of(
    prompt: list[int],
    sampling: dict[str, Any],
    choices: list[list[int]],
    tenant: str,
    priority: int,
    images: list[list[Any]],
    pixels: Sequence[UInt8[np.ndarray, " n"]] = (),
) -> Iterator[Request]:
    """Yields the requests of an `add` message, one per choice, which share its images."""
    tokens, shown = tuple(prompt), tuple(map(image_from_field, images, pixels))
    for request_id, seed32 in choices:
        yield Request(
            request_id=request_id,
            prompt=tokens,
            sampling=sampling_from_fields(sampling, seed32),
            tenant=tenant,
            priority=priority,
            images=shown,
        )
