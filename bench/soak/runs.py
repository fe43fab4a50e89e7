"""Runs agent sessions on a server, and compares their outputs with plain decoding.

A run serves all sessions with one drafter, some sessions at once. Each round has a record: output,
validity of constrained outputs, cached tokens and latency. The cached tokens of a round have bounds
that are computed from the conversations (`CacheModel`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from bench.soak.clients import Answer, Clients, Messages
from bench.soak.sessions import SCHEMA, SYSTEM, Round, Session, edited
from shared.text.chat_template import Conversation
from shared.text.tokenizer import Tokenizer

UNIT = 64
"""Positions between possible prefix hits of a hybrid model; pages are at most as long."""

QUARTERS = 4


@dataclass(frozen=True, kw_only=True)
class Record:
    """A round of a run.

    Attributes:
      session, round: Their indices.
      output: Text and calls, which no drafter may change.
      fault: Reason why a constrained output is invalid; "" for a valid one.
      prompt_tokens, cached_tokens: Of the prompt.
      at_least, at_most: Bounds of the cached tokens.
      seconds: Latency of the whole answer.
    """

    session: int
    round: int
    output: str
    fault: str
    prompt_tokens: int
    cached_tokens: int
    at_least: int
    at_most: int
    seconds: float


@dataclass
class CacheModel:
    """Bounds of the cached tokens of each prompt.

    A prompt that continues the last prompt of its session has at least the prefix at the end of
    which the last prompt saved a state: its last multiple of `UNIT`. The token after the prefix
    must be the same too, because the draft KV of EAGLE-like heads depends on it. After an edit the
    bound is 0, because older states may be evicted. A prompt has at most the longest prefix of any
    earlier prompt and output of its tenant. Prefixes are multiples of `UNIT`.
    """

    _saved: dict[int, int] = field(default_factory=dict)
    _texts: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    def bounds(self, session: Session, prompt: list[int]) -> tuple[int, int]:
        """Returns the least and the largest number of cached tokens of the next prompt."""
        keys, found = prefix_keys(prompt[:-1]), self._saved.get(session.number)
        saved = [i for i, key in enumerate(_continued_keys(prompt), 1) if key == found]
        texts = [i for i, key in enumerate(keys, 1) if key in self._texts[session.tenant]]
        return UNIT * max(saved, default=0), UNIT * max(texts, default=0)

    def add_prompt(self, session: Session, prompt: list[int]) -> None:
        """Adds a prompt that has been answered."""
        self._saved[session.number] = (_continued_keys(prompt) or [0])[-1]

    def add_text(self, session: Session, tokens: list[int]) -> None:
        """Adds a prompt, or a prompt with its output, that may be in the cache."""
        self._texts[session.tenant].update(prefix_keys(tokens))


def prefix_keys(tokens: list[int]) -> list[int]:
    """Returns a hash of the prefix up to each multiple of `UNIT`."""
    keys: list[int] = []
    for start in range(0, len(tokens) - UNIT + 1, UNIT):
        keys.append(hash((keys[-1] if keys else 0, tuple(tokens[start : start + UNIT]))))
    return keys


def _continued_keys(prompt: list[int]) -> list[int]:
    """Returns a hash of the prefix up to each multiple of `UNIT`, with the token after it."""
    keys = prefix_keys(prompt[:-1])
    return [hash((key, prompt[UNIT * place])) for place, key in enumerate(keys, 1)]


class Run:
    """All sessions on one server.

    Args:
      url: Address of the server.
      model: Folder with the tokenizer.
      at_once: Maximum number of sessions at the same time.
      report: Called after each round.
      plain: Answers of plain decoding, with which all conversations continue: a changed round
        changes no other. Without them a conversation continues with its own answers.

    Attributes:
      records: The rounds that have ended.
      answers: The answer of each session and round.
      num_aborts: Streams that were aborted.
    """

    def __init__(
        self,
        url: str,
        model: Path,
        at_once: int,
        report: Callable[[], None],
        plain: Mapping[tuple[int, int], Answer],
    ) -> None:
        self._clients, self._report, self._plain = Clients(url), report, plain
        self.answers: dict[tuple[int, int], Answer] = {}
        self._slots = asyncio.Semaphore(at_once)
        tokenizer = Tokenizer.from_folder(model)
        assert tokenizer is not None
        self._tokenizer, self._cache = tokenizer, CacheModel()
        self.records: list[Record] = []
        self.num_aborts = 0

    async def play(self, sessions: Iterable[Session]) -> None:
        """Plays all sessions; afterwards the records are sorted by session and round.

        Raises:
          openai.APIError, anthropic.APIError: A request failed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(self._session(session))
        finally:
            await self._clients.close()
        self.records.sort(key=lambda each: (each.session, each.round))

    async def _session(self, session: Session) -> None:
        async with self._slots:
            messages: Messages = [{"role": "system", "content": SYSTEM}]
            for number, round in enumerate(session.rounds):
                place = session.number, number
                messages = next_messages(messages, round)
                self.answers[place] = await self._round(session, number, round, messages)
                answer = self._plain.get(place, self.answers[place])
                messages = [*messages, answer.message, *results(answer, round)]
                self._report()

    async def _round(
        self, session: Session, number: int, round: Round, messages: Messages
    ) -> Answer:
        prompt = self._encoded(session, messages)
        low, high = self._cache.bounds(session, prompt)
        self._cache.add_text(session, prompt)
        if round.aborts_after:
            high = self._cache.bounds(session, prompt)[1]
            self.num_aborts += 1
            await self._clients.abort(session, messages, round)
        began = time.monotonic()
        answer = await self._clients.send(session, messages, round)
        seconds = time.monotonic() - began
        self._cache.add_prompt(session, prompt)
        self._cache.add_text(session, self._encoded(session, [*messages, answer.message]))
        fault = fault_of(session, round, answer)
        if answer.prompt_tokens != len(prompt):
            fault = f"{answer.prompt_tokens} prompt tokens, rendered {len(prompt)}"
        self.records.append(
            Record(
                session=session.number,
                round=number,
                output=output_of(answer),
                fault=fault,
                prompt_tokens=answer.prompt_tokens,
                cached_tokens=answer.cached_tokens,
                at_least=low,
                at_most=high,
                seconds=seconds,
            )
        )
        return answer

    def _encoded(self, session: Session, messages: Messages) -> list[int]:
        chat = Conversation(list(map(_parsed, messages)), session.tools)
        return self._tokenizer.encode_more(self._tokenizer.render_chat(chat))


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the arguments of its calls as objects, as templates read them."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{"function": {**f, "arguments": json.loads(f["arguments"])}} for f in functions]
    return {**message, "tool_calls": calls}


def next_messages(messages: Messages, round: Round) -> Messages:
    """Returns the conversation that a round sends."""
    kept = edited(messages, round.dropped)
    has_results = kept is messages and messages[-1]["role"] == "tool"
    return kept if has_results else [*kept, {"role": "user", "content": round.text}]


def results(answer: Answer, round: Round) -> Messages:
    """Returns the results of the calls of an answer."""
    return [
        {"role": "tool", "tool_call_id": call.id, "content": round.result} for call in answer.calls
    ]


def output_of(answer: Answer) -> str:
    """Returns text and calls of an answer as JSON, without ids."""
    calls = [[call.name, call.arguments] for call in answer.calls]
    return json.dumps([answer.text, calls])


def fault_of(session: Session, round: Round, answer: Answer) -> str:
    """Returns the reason why a constrained output is invalid; "" if it is valid."""
    if round.kind == "text":
        return ""
    if not answer.is_complete:
        return f"{round.kind} ended by the token limit"
    try:
        if round.kind == "schema":
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            return ""
        (call,) = answer.calls
        jsonschema.validate(call.arguments, session.schemas[call.name])
        return "" if call.name == round.tool else f"a call of {call.name}, not {round.tool}"
    except (ValueError, LookupError, jsonschema.ValidationError) as error:
        return f"{round.kind}: {error!s:.200}"


@dataclass(frozen=True, kw_only=True)
class Line:
    """Result of a run, a line of the table.

    Attributes:
      drafts: The drafter.
      cached: True with the prefix cache.
      rounds, aborts: Their numbers.
      changed: Rounds with an output that differs from plain decoding.
      invalid: Rounds with an invalid constrained output.
      hit_rate: Share of the prompt tokens that were cached.
      least_rate, most_rate: The computed bounds.
      lost, wrong: Rounds with fewer and with more cached tokens than the bounds.
      latency_ms: Median latency of a round in each quarter of the sessions.
      accept_length: Mean acceptance length of the server.
    """

    drafts: str
    cached: bool
    rounds: int
    aborts: int
    changed: int
    invalid: int
    hit_rate: float
    least_rate: float
    most_rate: float
    lost: int
    wrong: int
    latency_ms: list[float]
    accept_length: float

    @property
    def faults(self) -> list[str]:
        """Returns the failed checks."""
        counts = {"changed": self.changed, "invalid": self.invalid, "wrong cache": self.wrong}
        counts["lost cache"] = self.lost if self.cached else 0
        return [f"{count} {name}" for name, count in counts.items() if count]


def line_of(
    drafts: str,
    cached: bool,
    run: Run,
    records: Sequence[Record],
    plain: Sequence[Record],
    accept_length: float,
) -> Line:
    """Summarises a run; `plain` has the rounds of plain decoding without a prefix cache."""
    prompts = sum(each.prompt_tokens for each in records)

    def rate(of: Callable[[Record], int]) -> float:
        return round(sum(map(of, records)) / prompts, 4)

    return Line(
        drafts=drafts,
        cached=cached,
        rounds=len(records),
        aborts=run.num_aborts,
        changed=sum(a.output != b.output for a, b in zip(records, plain, strict=True)),
        invalid=sum(bool(each.fault) for each in records),
        hit_rate=rate(lambda each: each.cached_tokens),
        least_rate=rate(lambda each: each.at_least) if cached else 0.0,
        most_rate=rate(lambda each: each.at_most) if cached else 0.0,
        lost=sum(each.cached_tokens < each.at_least for each in records),
        wrong=sum(each.cached_tokens > (each.at_most if cached else 0) for each in records),
        latency_ms=quarters(records),
        accept_length=round(accept_length, 3),
    )


def quarters(records: Sequence[Record]) -> list[float]:
    """Returns the median latency in ms of the rounds in each quarter of the longest session."""
    longest = 1 + max(each.round for each in records)
    parts: list[list[float]] = [[] for _ in range(QUARTERS)]
    for each in records:
        parts[QUARTERS * each.round // longest].append(1000 * each.seconds)
    return [round(statistics.median(part), 1) if part else 0.0 for part in parts]


def table(lines: Sequence[Line]) -> str:
    """Returns the lines as a Markdown table."""
    head = "| drafts | prefix cache | rounds | changed | invalid | hit rate (bounds) | latency by "
    rows = [head + "quarter, ms | acceptance length |", "| --- " * 8 + "|"]
    for line in lines:
        times = " / ".join(f"{each:.0f}" for each in line.latency_ms)
        bounds = f"{line.hit_rate:.3f} ({line.least_rate:.3f} to {line.most_rate:.3f})"
        cells = [line.drafts, "on" if line.cached else "off", line.rounds, line.changed]
        cells += [line.invalid, bounds if line.cached else "-", times, f"{line.accept_length:.2f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)
