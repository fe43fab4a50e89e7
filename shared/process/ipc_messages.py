"""The messages between the engine process and the HTTP server, and their frames on the socket.

A frame is a 4-byte little-endian length and a msgpack list whose first entry names the message.

- engine to server: `facts` (a `ModelFacts`), `step` (rows of one step), `refused` (id, sentence,
  field or None), `metrics` (a snapshot; unasked at the start and about once a second, so that the
  server hears that the engine goes on), `corpora` (ticket, tokens by name, and sentence and field
  where it was refused), `drain` (seconds that it may take), `end` (sentence, whether it is a
  failure).
- server to engine: `add` (prompt, sampling, [id, seed32] per choice, tenant, priority, pictures),
  `abort` (id), `finish` (id, final token count), `metrics`, `corpus_add` (ticket, name, int32
  tokens), `corpus_remove` (ticket, name), `corpus_list` (ticket), `drained` (every answer has
  left).

The pixels of an `add` are no part of its frame, which would be packed and unpacked as a whole while
nothing else is done. Each picture's go before it: a frame `bytes` (how many), and then those bytes.
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
from shared.engine.image_inputs import Picture
from shared.engine.request import Event, FinishReason, Request, SamplingParams, StepTrace
from shared.models.image_processor import PictureConfig
from shared.models.sampling import SamplingDefaults
from shared.options.observing import ObservingOptions
from shared.spec.logprobs import Scores
from shared.text.delimiters import marks_of
from shared.text.tokenizer import Tokenizer

_LENGTH = struct.Struct("<I")

BYTES = "bytes"
"""Names the frame of which bytes follow."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the server has to know about the model and the engine to check a request.

    Attributes:
      model_name: Served name of the model.
      model_folder: Absolute path of the checkpoint, where the tokenizer lies.
      limits: Bounds of a request.
      eos_ids: Tokens that end a text unless the request ignores them, as the model's settings name
        them; the tokenizer may name one more.
      sampling_defaults: Of requests that leave fields open.
      max_open_requests: Most requests that run or wait at a time; None bounds none.
      max_draft_depth: S, the most drafts that a step can accept; 0 without speculation.
      host_names: What clients may call the server by beside the machine's own names; None: any.
      admin_api_key: Opens the routes that change the server; None keeps them closed.
      corpus_path: JSONL file of the external corpus to start with, or None.
      api_key: What every request must know; None: nothing.
      chat_template: Jinja file that is used in place of the folder's templates, or None.
      reasoning_parser: How the model marks its reasoning; None: answers are not parsed for it.
      tool_call_parser: How the model writes calls of tools; None: it is told of none.
      drafter: What drafts, as its flag names it; None without speculation.
      trace_all_requests: Every request is traced, not only those that ask.
      strict_fields: A request with a field that has no effect is an error.
      admin_host_names: As `host_names`, of the admin's listener.
      allowed_origins: Sites whose pages may read answers, as browsers write them; `*`: any.
      observing: What the server tells of its work.
      ranks: How many run the model together.
      silence_s: How long the engine may say nothing before it counts as frozen.
      pictures: How the model wants pictures; None: it sees none.
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
    strict_fields: bool = False
    admin_host_names: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    observing: ObservingOptions = field(default_factory=ObservingOptions)
    ranks: int = 1
    silence_s: float = math.inf
    pictures: PictureConfig | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """What answers show although the tokenizer may have it as special tokens."""
        return marks_of(self.tool_call_parser, self.reasoning_parser)

    def tokenizer(self) -> Tokenizer | None:
        """Reads the model's tokenizer with its chat template, as answers are shown.

        Raises:
          ValueError: A file is broken; one sentence.
        """
        return Tokenizer.from_folder(self.model_folder, self.marks, self.chat_template)

    def with_end(self, end_id: int | None) -> ModelFacts:
        """With the tokenizer's end token, if it has one, among those that end a text.

        A fine-tuned chat model's own end often stands in tokenizer_config.json alone, and
        config.json still names the base model's. Only who reads requests reads the tokenizer; the
        engine gets all ends of a text with each request.
        """
        if end_id is None or end_id >= self.limits.vocab_size or end_id in self.eos_ids:
            return self
        return replace(self, eos_ids=(*self.eos_ids, end_id))

    def to_message(self) -> list[Any]:
        """The message that the engine process sends first: its name, and every fact by name."""
        return ["facts", asdict(self)]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ModelFacts:
        """The inverse of `to_message`, from the fields that it carries."""
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
        if (config := fields["pictures"]) is not None:
            lists = {name: tuple(config[name]) for name in ("mean", "deviation")}
            parts["pictures"] = PictureConfig(**{**config, **lists})
        return cls(**{**fields, **parts})


def pack(message: list[Any]) -> bytes:
    """A message as it travels: its length in bytes, then the message as MessagePack."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack(message)
    body = packer.getbuffer()
    return b"".join((_LENGTH.pack(len(body)), body))


def in_parts(message: list[Any], pixels: Sequence[np.ndarray]) -> Iterator[bytes | memoryview]:
    """A message behind arrays of bytes that go with it, none of which is copied."""
    for each in pixels:
        yield pack([BYTES, each.nbytes])
        yield np.ascontiguousarray(each).reshape(-1).data
    yield pack(message)


class FrameReader:
    """Cuts a stream of bytes into messages, however the bytes arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._pixels: list[UInt8[np.ndarray, " n"]] = []  # of the message that follows
        self._num_filled = 0  # of the last ones

    @property
    def is_within(self) -> bool:
        """Whether a part of a message has arrived, and not all of it."""
        return bool(self._bytes or self._pixels)

    def feed(self, received: bytes) -> Iterator[list[Any]]:
        """Yields each message that is whole by now, with the bytes before it as its last entry."""
        self._bytes += received
        while self._fill() and (message := self._cut()) is not None:
            if message[0] == BYTES:
                self._pixels.append(np.empty(message[1], np.uint8))
                self._num_filled = 0
                continue
            pixels, self._pixels = self._pixels, []
            yield [*message, pixels] if pixels else message

    def _fill(self) -> bool:
        """Whether what has arrived is enough for the bytes that are under way."""
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
        """The next frame, if it is whole."""
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
    """A row of a `step` message."""
    reason = event.finish_reason.value if event.finish_reason else None
    logprobs = event.logprobs
    values = [event.request_id, event.tokens, event.accepted, reason, event.error, logprobs]
    return [*values, event.cached_tokens, event.step, _scores_to_field(event.scores)]


def event_from_row(row: list[Any]) -> Event:
    """The inverse of `event_to_row`."""
    request_id, tokens, accepted, reason, error, logprobs, cached, step, scores = row
    if logprobs is not None:
        logprobs = [(chosen, [tuple(pair) for pair in best]) for chosen, best in logprobs]
    finish_reason = FinishReason(reason) if reason else None
    trace = None if step is None else StepTrace(*step)
    ended = (finish_reason, error, logprobs, cached, trace, _scores_from_field(scores))
    return Event(request_id, tokens, accepted, *ended)


def _scores_to_field(scores: Scores | None) -> list[bytes] | None:
    """Scores as they travel: those of a long prompt are many numbers."""
    return None if scores is None else [np.ascontiguousarray(part).tobytes() for part in scores]


def _scores_from_field(parts: list[bytes] | None) -> Scores | None:
    if parts is None:
        return None
    kinds = (np.float32, np.int32, np.int32, np.float32)
    chosen, ranks, *best = map(np.frombuffer, parts, kinds)
    return Scores(chosen, ranks, *(part.reshape(len(chosen), -1) for part in best))


def sampling_to_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as they travel; the seeds of the choices travel beside them."""
    return asdict(sampling)


def sampling_from_fields(fields: dict[str, Any], seed32: int) -> SamplingParams:
    """The inverse of `sampling_to_fields`, with the seed of one choice."""
    stops = tuple(fields["stop_token_ids"])
    return SamplingParams(**{**fields, "seed32": seed32, "stop_token_ids": stops})


def picture_to_field(picture: Picture) -> list[Any]:
    """A picture as it travels, but for its pixels."""
    return [picture.first, picture.grid, picture.pixels.shape, picture.digest]


def picture_from_field(field: list[Any], pixels: UInt8[np.ndarray, " n"]) -> Picture:
    """The inverse of `picture_to_field`."""
    first, grid, shape, digest = field
    return Picture(first=first, grid=tuple(grid), pixels=pixels.reshape(shape), digest=digest)


def requests_of(
    prompt: list[int],
    sampling: dict[str, Any],
    choices: list[list[int]],
    tenant: str,
    priority: int,
    pictures: list[list[Any]],
    pixels: Sequence[UInt8[np.ndarray, " n"]] = (),
) -> Iterator[Request]:
    """The requests of an `add`, one a choice; they share its pictures."""
    tokens, shown = tuple(prompt), tuple(map(picture_from_field, pictures, pixels))
    for request_id, seed32 in choices:
        yield Request(
            request_id=request_id,
            prompt=tokens,
            sampling=sampling_from_fields(sampling, seed32),
            tenant=tenant,
            priority=priority,
            pictures=shown,
        )
