"""Compares the outputs of a running server with plain decoding, token by token.

    python -m bench.quality.verify
    python -m bench.quality.verify --num-prompts 50 --against http://127.0.0.1:8001

The server is that of `make serve` unless `--base-url` names another. Each prompt is sent as it is,
several at a time. Then it is sent alone, without drafts and in a cache namespace of its own, so
that the prefix cache has no hit. With `--against` a second server replaces the plain requests.
Prompts are held-out tasks of the shipped model, or lines of `--prompts`: JSON objects with
`messages` or `prompt` and other request fields. The exit code is 1 if an output differs. With
rejection sampling, sampled outputs differ by design.
"""

import argparse
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from bench.common.environment import write_results
from bench.common.markdown import table
from bench.common.server import (
    HIDDEN,
    headers_of,
    no_answer,
    plain_url,
    prompt_count,
    server_options,
    url_of,
)
from bench.common.waiting import progress
from bench.quality.accuracy_table import MISSING
from models.demo.data import TEXT_SHARES, examples

COUNT, MAX_TOKENS, CONCURRENCY = 20, 64, 8
SHOWN = 2
"""Top tokens requested in the second pass: their distance is the margin."""

CONNECT_S = 10.0
DIFFERS, FAILED = 1, 2
NOT_ASKED = {"n", "stream", "logprobs", "top_logprobs"}

Body = dict[str, Any]


class NotAnswered(Exception):
    """A server did not answer a prompt; one sentence."""


@dataclass(frozen=True)
class Text:
    """Output of a server.

    Attributes:
      tokens: Of the output.
      margins: Units of logits between the best two tokens of each place, before any processing;
        empty if not requested.
      verify_steps, accepted: Steps that verified drafts or decoded plainly, and drafts that they
        accepted.
    """

    tokens: list[int]
    margins: list[float]
    verify_steps: int
    accepted: int


@dataclass(frozen=True)
class Divergence:
    """First difference of two outputs.

    Attributes:
      prompt: Its number.
      position: The token in the output, from 0.
      served, other: The tokens there; None where a text has ended.
      margin: See `Text`, in the other text; None where that has ended.
    """

    prompt: int
    position: int
    served: int | None
    other: int | None
    margin: float | None


@dataclass(frozen=True)
class Verdict:
    """Compared outputs, in the order of the prompts."""

    served: list[Text]
    divergences: list[Divergence]

    def to_json(self) -> dict[str, Any]:
        """Returns the contents of the `--out` file."""
        steps = sum(text.verify_steps for text in self.served)
        accepted = sum(text.accepted for text in self.served)
        return {
            "checked": len(self.served),
            "equal": len(self.served) - len(self.divergences),
            "tokens": sum(len(text.tokens) for text in self.served),
            "accept_length": round(1 + accepted / steps, 3) if steps else 1.0,
            "divergences": [asdict(each) for each in self.divergences],
        }


class Server:
    """A server that speaks OpenAI's API and gives token ids."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._url = url
        self._client = httpx.Client(
            base_url=url,
            headers=headers_of(api_key),
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
            trust_env=False,
        )

    def ask(self, body: Body) -> Text:
        """The text of a prompt.

        Raises:
          NotAnswered: There is none.
        """
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        try:
            answer = self._client.post(path, json=body | {"return_token_ids": True})
            answer.raise_for_status()
            return text_of(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            raise NotAnswered(no_answer(self._url, error)) from error

    def ask_all(
        self, bodies: Sequence[Body], concurrency: int, done: Callable[[], None]
    ) -> list[Text]:
        """Returns the texts of some prompts, in order; raises the errors of `ask`.

        Args:
          done: Called at the end of each.
        """

        def ask(body: Body) -> Text:
            text = self.ask(body)
            done()
            return text

        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(ask, bodies))


def text_of(answer: Body) -> Text:
    """The only choice of an answer."""
    choice, histogram = answer["choices"][0], answer["speculative"]["accept_length_histogram"]
    return Text(
        tokens=choice["token_ids"],
        margins=list(_margins(choice["logprobs"])),
        verify_steps=sum(histogram),
        accepted=sum(number * count for number, count in enumerate(histogram)),
    )


def _margins(logprobs: Body | None) -> Iterator[float]:
    if logprobs is None:
        return
    if "content" in logprobs:
        places = [[best["logprob"] for best in one["top_logprobs"]] for one in logprobs["content"]]
    else:
        places = [list(best.values()) for best in logprobs["top_logprobs"]]
    for values in places:
        best, second = sorted(values)[: -SHOWN - 1 : -1]
        yield best - second


def with_margins(body: Body) -> Body:
    """The same, asking for the best tokens of each place."""
    if "messages" in body:
        return body | {"logprobs": True, "top_logprobs": SHOWN}
    return body | {"logprobs": SHOWN}


def plainly(body: Body) -> Body:
    """Returns the body without drafts and with another cache namespace."""
    return body | {"speculative": {"enabled": False}, "user": f"verify-{uuid.uuid4().hex}"}


def first_difference(prompt: int, served: Text, other: Text) -> Divergence | None:
    """Returns the first difference of two outputs of a prompt, or None."""
    pairs = zip(served.tokens, other.tokens, strict=False)
    shorter = min(len(served.tokens), len(other.tokens))
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    if at == len(served.tokens) == len(other.tokens):
        return None
    return Divergence(
        prompt=prompt,
        position=at,
        served=served.tokens[at] if at < len(served.tokens) else None,
        other=other.tokens[at] if at < len(other.tokens) else None,
        margin=other.margins[at] if at < len(other.margins) else None,
    )


def verify(
    server: Server, against: Server | None, bodies: Sequence[Body], concurrency: int
) -> Verdict:
    """Sends every prompt twice; raises `NotAnswered`."""
    asked = [with_margins(body) for body in bodies]
    with progress("answers", 2 * len(bodies)) as done:
        served = server.ask_all(bodies, concurrency, done)
        if against is None:
            others = server.ask_all(list(map(plainly, asked)), 1, done)
        else:
            others = against.ask_all(asked, concurrency, done)
    found = map(first_difference, range(len(bodies)), served, others)
    return Verdict(served, [each for each in found if each is not None])


def bodies_of(args: argparse.Namespace) -> list[Body]:
    """The prompts, each with how its text is to be made.

    Raises:
      ValueError: The file is none, or a line of it is no prompt.
    """
    how = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    how |= {"model": args.model} if args.model else {}
    if args.prompts is None:
        tasks = islice(examples("held_out", args.seed, TEXT_SHARES), args.num_prompts)
        prompts: list[Body] = [{"messages": task.messages} for task in tasks]
    else:
        prompts = read_prompts(args.prompts)
    return [how | {"seed": number} | prompt for number, prompt in enumerate(prompts)]


def read_prompts(path: Path) -> list[Body]:
    """The lines of a file; raises as `bodies_of`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as lines of JSON: {error}") from error
    for number, prompt in enumerate(found, start=1):
        if not isinstance(prompt, dict) or len({"messages", "prompt"} & prompt.keys()) != 1:
            raise ValueError(f"{path}:{number} is no object with either messages or prompt")
        if asked := NOT_ASKED & prompt.keys():
            raise ValueError(
                f"{path}:{number} has {min(asked)}: each line is one text, not streamed"
            )
    return found


def render(verdict: Verdict, other: str) -> str:
    """Renders the result as tables."""
    fields = verdict.to_json()
    names = ("checked", "equal", "tokens", "accept_length")
    lines = [
        table([("prompts", "equal", "tokens", "accept length"), [str(fields[n]) for n in names]])
    ]
    if verdict.divergences:
        head = ("prompt", "position", "as served", other, "margin of the best two")
        rows = [
            [MISSING if value is None else f"{value:.6g}" for value in asdict(each).values()]
            for each in verdict.divergences
        ]
        lines.append(table([head, *rows]))
    return "\n\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.quality.verify", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    server_options(made)
    made.add_argument(
        "--against",
        type=plain_url,
        metavar="URL",
        help="another server that must return the same outputs",
    )
    which = made.add_mutually_exclusive_group()
    which.add_argument("--prompts", type=Path, help="JSONL file")
    prompt_count(which, COUNT, "of held-out tasks")
    made.add_argument("--seed", type=int, default=0, help="seed of the held-out tasks")
    made.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--max-concurrency", type=int, default=CONCURRENCY, help="prompts at once")
    made.add_argument(
        "--concurrency", dest="max_concurrency", type=int, default=HIDDEN, help=HIDDEN
    )
    made.add_argument("--out", type=Path, help="JSON file")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Verifies; returns the exit code."""
    arguments = parser()
    args = arguments.parse_args(argv)
    try:
        bodies = bodies_of(args)
        how = (args.api_key, args.timeout)
        against = Server(args.against, *how) if args.against else None
        verdict = verify(Server(url_of(args), *how), against, bodies, args.max_concurrency)
    except (NotAnswered, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    print(render(verdict, args.against or "plainly"))
    if args.out:
        asked = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
        del asked["api_key"]
        write_results(args.out, {"asked": asked, **verdict.to_json()})
    return DIFFERS if verdict.divergences else 0


if __name__ == "__main__":
    raise SystemExit(main())
