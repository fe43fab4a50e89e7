"""Fixtures of HTTP tests: a tiny tokenizer, an engine without a model, a server in its process.

`python -m tests.support.http_fixtures FOLDER` serves the engine without a model from FOLDER, which
may hold a tokenizer; flags of a start may follow. It repeats the prompt, several tokens a step;
some prompts make it misbehave.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from shared.engine.checks import RequestLimits
from shared.engine.ngram.index import NgramIndex
from shared.engine.request import (
    Event,
    FinishReason,
    InvalidRequestError,
    Request,
)
from shared.models.image_processor import ImageProcessorConfig
from shared.models.model_folder import ModelFolder
from shared.models.sampling import SamplingDefaults
from shared.options.flags import spelling
from shared.options.ngram import NgramConfig
from shared.options.observing import ObservingOptions
from shared.process import loop
from shared.process.address import Listeners, bind
from shared.process.ipc_messages import ServerInfo
from shared.process.watchdog import Watchdog
from tests.support.byte_tokenizer import SPECIAL, byte_tokenizer
from tests.support.default_signals import heard_signals
from tests.support.echo_engine import (
    CRASH,
    FAIL,
    FREEZE,
    FROZEN,
    REJECTED,
    RELEASED,
    SLOW,
    VOCAB,
    is_held,
    logprob_of,
    scores_of,
    step_of,
    token_of,
)
from tests.support.polling import wait_until

ROOT = Path(__file__).resolve().parents[2]
END = 256  # the id of <|end|>, which only the tokenizer names as the end
IMAGE = 259  # the id of <|image|>, for an image where the engine is to see
CONFIG_END = 294  # the end that the model's settings name
CONTEXT = 512
POOL_TOKENS = 400  # what the pages hold of one request
TOKENS_PER_STEP = 3
SLOTS = 4
MAX_OPEN = 200
MAX_BIAS, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS = 3, 5, 4
HOST_NAME = "model.example"
ADMIN_KEY, MAX_CORPUS_TOKENS = "sésame ouvre-toi", 1000
JSON = {"content-type": "application/json"}
LIE = ord("!")
WATCHDOG_S = 5.0
DRAIN_S = 20.0
_SWITCH: dict[str, Any] = {"action": "store_true"}
START_S = 180.0  # a backend may compile first
ANSWER_S = 300.0  # of any request; only a server that hangs takes longer
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
IMAGES = ImageProcessorConfig(
    multiple=8,
    min_pixels=8 * 8,
    max_pixels=64 * 64,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
)
"""Image processor config of a `Repeater` with image input."""

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if m.name == 'half' %}{{ '\\ud800' }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, end: str = SPECIAL[0]) -> None:
    """Writes the tokenizer files of a checkpoint folder; `byte_tokenizer` unless one is given."""
    (tokenizer or byte_tokenizer()).save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": end}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Repeater:
    """An engine that answers with the prompt again and again; `Engine`'s interface, no device.

    Token i of the output is token i of the prompt, but the first differs by seed: it is replaced by
    a letter of the seed, so that choices differ. A positive bias makes its token every
    token, and FILLER stands for a stop token before `min_tokens`. A token's logprob is its id by
    -256, and the ids from it on are the best. The first token of an image is how red its first
    pixel is.

    Args:
      wrong_at: Number of a token of outputs that is LIE where drafts are allowed; None: none is.
      folder: Where `release` writes.
    """

    def __init__(self, wrong_at: int | None, folder: Path) -> None:
        self._wrong_at, self._released = wrong_at, folder / RELEASED
        self.metrics = self
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished: dict[str, int] = dict.fromkeys(("stop", "abort"), 0)
        config = NgramConfig(
            speculative_ngram_external_sam_budget=2,
            speculative_ngram_external_corpus_max_tokens=MAX_CORPUS_TOKENS,
        )
        self.ngram = NgramIndex(config, nodes=4, depth=3, vocab=VOCAB, chain=False)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def snapshot(self) -> dict[str, float]:
        labels = {
            f'request_success_total{{finished_reason="{name}"}}': count
            for name, count in self.finished.items()
        }
        gauges = {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "request_slots_free": SLOTS - len(self.running),
        }
        return {**gauges, **labels}

    def add(self, request: Request) -> None:
        if REJECTED in (request.prompt[0], *request.sampling.logit_bias):
            raise InvalidRequestError("prompt", "the engine refuses this prompt")
        self.waiting.append(request)

    def abort(self, request_id: int) -> None:
        self.finished["abort"] += self._remove(request_id)

    def finish(self, request_id: int, num_tokens: int) -> None:
        self.finished["stop"] += self._remove(request_id)

    def step(self) -> list[Event]:
        while self.waiting and len(self.running) < SLOTS:
            self.running.append(self.waiting.pop(0))
        advancing = [r for r in self.running if not is_held(r) or self._released.exists()]
        if not advancing:
            time.sleep(0.02)
        return [self._advance(request) for request in advancing]

    def close(self) -> None:
        pass

    def _remove(self, request_id: int) -> bool:
        """Removes a request; returns whether it was active."""
        before = len(self.running) + len(self.waiting)
        for requests in (self.running, self.waiting):
            requests[:] = [r for r in requests if r.request_id != request_id]
        return len(self.running) + len(self.waiting) < before

    def _advance(self, request: Request) -> Event:
        if request.prompt[0] == CRASH:
            raise RuntimeError("the device fell over")
        if request.prompt[0] == FAIL and len(request.output) >= TOKENS_PER_STEP:
            self._remove(request.request_id)
            sentence = "the logits are not finite"
            return Event(request.request_id, [], None, FinishReason.ERROR, sentence, None)
        if request.prompt[0] == SLOW:
            time.sleep(0.02)
        if request.prompt[0] == FREEZE:
            print(FROZEN, flush=True)
            time.sleep(3600)
        return self._extend(request)

    def _extend(self, request: Request) -> Event:
        first = not request.output
        tokens: list[int] = []
        reason = None if request.sampling.max_tokens else FinishReason.LENGTH
        drafts = TOKENS_PER_STEP - 1
        if request.sampling.max_draft_tokens is not None:
            drafts = min(drafts, request.sampling.max_draft_tokens)
        for _ in range(0 if reason else 1 if first else drafts + 1):
            is_wrong = drafts > 0 and len(request.output) == self._wrong_at
            token = LIE if is_wrong else token_of(request, len(request.output))
            tokens.append(token)
            request.output.append(token)
            if token in request.sampling.stop_token_ids:
                reason = FinishReason.STOP
            elif len(request.output) == request.sampling.max_tokens:
                reason = FinishReason.LENGTH
            if reason:
                break
        if reason:
            self._remove(request.request_id)
        accepted = None if first else drafts
        count = request.sampling.logprobs
        logprobs = None if count is None else [logprob_of(token, count) for token in tokens]
        step = step_of(request, tokens, accepted) if request.sampling.traces else None
        more = (logprobs, 0, step, scores_of(request) if first else None)
        return Event(request.request_id, tokens, accepted, reason, None, *more)


@dataclass
class Server:
    """A server in a process of its own.

    Attributes:
      process: The engine's process.
      url: Where it is served.
      lines: What it printed, complete after `join_output`.
      reader: The thread that reads its output.
    """

    process: subprocess.Popen[str]
    url: str
    lines: list[str]
    reader: threading.Thread

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """A request with a JSON body."""
        # Written in ASCII, so that it can hold halves of characters.
        body = json.dumps(fields)
        return httpx.post(self.url + path, content=body, headers=JSON, timeout=ANSWER_S)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream, without the closing [DONE], which must be there."""
        with httpx.stream(
            "POST", self.url + path, json={**fields, "stream": True}, timeout=ANSWER_S
        ) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    @contextlib.contextmanager
    def post_slowly(self, num_choices: int, prompt: Sequence[int] = (SLOW, SLOW)) -> Iterator[None]:
        """A request that occupies the engine until the block ends; then its client disconnects."""
        body = {"prompt": [prompt] * num_choices, "max_tokens": 390, "stream": True}
        with httpx.stream("POST", self.url + COMPLETIONS, json=body, timeout=ANSWER_S) as answer:
            assert answer.status_code == 200, answer.read()
            yield

    @contextlib.contextmanager
    def post_and_leave(self, **fields: Any) -> Iterator[None]:
        """A completion that its client leaves when the block ends."""
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps(fields).encode()
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(post_head(COMPLETIONS, len(body)) + body)
            yield

    def wait_for_line(self, text: str) -> None:
        """Waits until the server has written a line with this text."""
        assert wait_until(lambda: any(text in line for line in self.lines)), self.lines

    def metrics(self) -> dict[str, float]:
        """The values of /metrics by name, without the label that all have."""
        page = httpx.get(self.url + "/metrics", timeout=ANSWER_S).text
        rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        return {_bare(name): float(value) for name, value in rows}

    def wait_for_metric(self, name: str, value: float, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.metrics()[name] != value:
            assert time.monotonic() < deadline, (name, self.metrics()[name])
            time.sleep(0.02)

    def join_output(self) -> None:
        """Waits for the end of the output, which the last of all processes closes."""
        self.reader.join(ANSWER_S)

    def pids(self) -> list[int]:
        """The engine's process and its children."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]


def _bare(name: str) -> str:
    """The name of a metric without its label `model_name`."""
    return re.sub(r'\bmodel_name="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")


def post_head(path: str, length: int) -> bytes:
    """The head of a POST of JSON, for a test that writes its bytes itself."""
    fields = f"Host: {HOST_NAME}\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


@contextlib.contextmanager
def serving(
    command: Sequence[str], threads: int | None = 1, folder: Path = ROOT
) -> Iterator[Server]:
    """Starts a server with `python COMMAND` on a free port and ends it.

    Args:
      threads: Of its libraries; None leaves them as they are elsewhere.
      folder: Working folder.
    """
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with heard_signals():
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
    lines: list[str] = []
    found: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read_lines, args=(process, lines, found), daemon=True)
    reader.start()
    try:
        url = found.get(timeout=START_S)
        assert url, lines
        yield Server(process, url, lines, reader)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(5)


def _read_lines(process: subprocess.Popen[str], lines: list[str], found: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        address = re.search(r" is served at (http://[\w.:\[\]]+)", lines[-1])
        if address:
            found.put(address[1])
    found.put("")


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def main() -> int:
    """Serves a `Repeater`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("corpus", nargs="?")
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--api-key")
    parser.add_argument("--allowed-origins", nargs="*", default=[])
    parser.add_argument("--trace-all-requests", action="store_true")
    parser.add_argument("--strict-fields", action="store_true")
    parser.add_argument("--store-responses", action="store_true")
    parser.add_argument("--wrong-at", type=int)
    parser.add_argument("--well-behaved", action="store_true", help="without the ids from CRASH on")
    parser.add_argument("--with-admin-listener", action="store_true")
    parser.add_argument("--sees", action="store_true")
    parser.add_argument("--model-name", default="repeater")
    parser.add_argument("--structured-outputs", action="store_true", help="accepted, not applied")
    parser.add_argument("--context-length", type=int, default=CONTEXT)
    parser.add_argument("--max-request-tokens", type=int, default=POOL_TOKENS)
    parser.add_argument("--graceful-shutdown-timeout", type=float, default=DRAIN_S)
    for item in fields(ObservingOptions):
        is_switch = item.default is False
        parser.add_argument(
            spelling(item.name), **_SWITCH if is_switch else {"default": item.default}
        )
    flags = parser.parse_args()
    limits = RequestLimits(
        context_length=flags.context_length,
        max_request_tokens=flags.max_request_tokens,
        vocab_size=CRASH if flags.well_behaved else VOCAB,
        max_stop_token_ids=4,
        max_logit_bias_entries=MAX_BIAS,
        max_logprobs=MAX_LOGPROBS,
        max_prompt_logprobs=MAX_PROMPT_LOGPROBS,
        structured_outputs=flags.structured_outputs,
        max_image_tokens=IMAGES.max_pixels // IMAGES.multiple**2 if flags.sees else 0,
        image_token=IMAGE if flags.sees else None,
    )
    facts = ServerInfo(
        model_name=flags.model_name,
        model_folder=str(Path(flags.folder).resolve()),
        limits=limits,
        eos_ids=() if flags.well_behaved else (CONFIG_END,),
        sampling_defaults=SamplingDefaults.from_folder(ModelFolder(flags.folder)),
        max_open_requests=MAX_OPEN,
        max_draft_depth=TOKENS_PER_STEP - 1,
        host_names=(HOST_NAME,),
        admin_api_key=ADMIN_KEY,
        corpus_path=flags.corpus,
        api_key=flags.api_key,
        reasoning_parser=flags.reasoning_parser,
        tool_call_parser=flags.tool_call_parser,
        trace_all_requests=flags.trace_all_requests,
        strict_fields=flags.strict_fields,
        store_responses=flags.store_responses,
        admin_host_names=(HOST_NAME,),
        allowed_origins=tuple(flags.allowed_origins),
        observing=ObservingOptions(
            **{i.name: getattr(flags, i.name) for i in fields(ObservingOptions)}
        ),
        images=IMAGES if flags.sees else None,
    )
    watchdog = Watchdog(WATCHDOG_S)
    engine = Repeater(flags.wrong_at, Path(flags.folder))
    admin = bind("127.0.0.1", 0) if flags.with_admin_listener else []
    listeners = Listeners(bind("127.0.0.1", 0), admin)
    return loop.run(
        engine, facts, listeners, engine.ngram, watchdog, flags.graceful_shutdown_timeout
    )


if __name__ == "__main__":
    raise SystemExit(main())
