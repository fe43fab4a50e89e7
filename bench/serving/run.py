"""Load test of a running server: latencies, throughput, acceptance.

    python -m bench.serving --dataset-name problems --num-prompts 100 --request-rate 4 \
        --out run.json --html run.html

The server is any with the OpenAI API. Flags are spelled as in the benches of SGLang and vLLM, and
`bench/serving/metrics.py` defines the metrics. The prompts ship with the project: held-out word
problems, copying, code and chats, or random tokens of chosen lengths. The exit code is 1 if a
request failed, and 2 if none was sent.
"""

import argparse
import asyncio
import json
import math
import shlex
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common.environment import write_results
from bench.common.server import prompt_count, server_options, url_of
from bench.common.waiting import progress
from bench.serving import table as serving_table
from bench.serving.client import Client, NoServer, Run, run_load
from bench.serving.metrics import summary
from bench.serving.prompt_sets import MIX, NAMES, Ask, RandomLengths, asks


def json_object(text: str) -> dict[str, Any]:
    """Fields of a body."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving", description=(__doc__ or "").splitlines()[0]
    )
    server_options(parser)
    add = parser.add_argument
    add("--dataset-name", choices=NAMES, default=MIX, help=f"default: {MIX}")
    prompt_count(parser, 100)
    add("--random-input-len", type=int, default=512, help="tokens of a random prompt")
    add(
        "--random-output-len", type=int, default=128, help="tokens of the output of a random prompt"
    )
    add("--random-range-ratio", type=float, default=1.0, help="shortest length over longest")
    add("--random-vocab", type=int, default=1000, help="number of random token ids")
    add("--max-tokens", type=int, default=384, help="maximum tokens of other outputs")
    add("--temperature", type=float, default=0.0)
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests per second (default: all at once)",
    )
    add("--max-concurrency", type=int, help="maximum of concurrent requests (default: no limit)")
    add("--seed", type=int, default=0, help="seed of prompts, arrival times and outputs")
    add("--stream", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--warmup-requests",
        type=int,
        default=1,
        help="requests before the measurement, not counted",
    )
    add("--extra-request-body", type=json_object, default={}, metavar="JSON")
    add("--out", type=Path, help="JSON file of all numbers, request by request")
    add("--html", type=Path, help="HTML report with plots")
    options = parser.parse_args(arguments)
    if options.request_rate <= 0 or options.num_prompts < 1 or (options.max_concurrency or 1) < 1:
        parser.error("--request-rate, --num-prompts and --max-concurrency must be above 0")
    return options


def asked(options: argparse.Namespace, model: str) -> list[Ask]:
    """The requests.

    Raises:
      ValueError: They cannot be made; one sentence.
    """
    lengths = RandomLengths(
        input=options.random_input_len,
        output=options.random_output_len,
        range_ratio=options.random_range_ratio,
        vocab=options.random_vocab,
    )
    found = asks(options.dataset_name, options.num_prompts, options.seed, lengths)
    common = {"model": model, "temperature": options.temperature, "max_tokens": options.max_tokens}
    return [
        Ask(ask.path, {**common, "seed": options.seed + index, **ask.body}).with_fields(
            **options.extra_request_body
        )
        for index, ask in enumerate(found)
    ]


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Sends everything and counts it.

    Raises:
      NoServer: No server responds.
      ValueError: The requests cannot be made; one sentence.
    """
    async with Client(url_of(options), options.api_key, options.timeout) as client:
        model = options.model or await client.model()
        requests = asked(options, model)
        how: dict[str, Any] = {"streams": options.stream, "seed": options.seed}
        warm = requests[: options.warmup_requests]
        await run_load(client, warm, rate=math.inf, most=None, **how, done=lambda: None)
        before = await client.accept_counters()
        with progress("requests", len(requests)) as done:
            run = await run_load(
                client,
                requests,
                rate=options.request_rate,
                most=options.max_concurrency,
                **how,
                done=done,
            )
        after = await client.accept_counters()
    found = summary(run, options.stream, before, after)
    return {"server": {"url": url_of(options), "model": model}, "summary": found} | lines(run)


def lines(run: Run) -> dict[str, Any]:
    """Returns the metrics of each request."""
    return {"requests": [asdict(reply) for reply in run.replies]}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as the file has them; a key is no part of it."""
    found = {name: value for name, value in vars(options).items() if name != "api_key"}
    rate = found["request_rate"]
    texts = {name: str(found[name]) for name in ("out", "html") if found[name]}
    return found | texts | {"request_rate": None if math.isinf(rate) else rate}


def command_of(arguments: list[str]) -> str:
    """The command as it was given, without its key."""
    kept, hides = list[str](), False
    for word in arguments:
        name, has_value, _ = word.partition("=")
        kept += ["***" if hides else f"{name}=***" if name == "--api-key" and has_value else word]
        hides = word == "--api-key"
    return shlex.join(["python", "-m", "bench.serving", *kept])


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the files."""
    words = sys.argv[1:] if arguments is None else arguments
    options = parse(words)
    try:
        measured = asyncio.run(measure(options))
    except (NoServer, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    found = {"command": command_of(words), "options": settings_of(options), **measured}
    Console().print(serving_table.table(found))
    if options.out:
        write_results(options.out, found)
    if options.html:
        # The report imports matplotlib, which other runs do not need.
        report = import_module("bench.serving.html_report")
        options.html.write_text(report.page(found), encoding="utf-8")
    return 1 if found["summary"]["errors"] else 0
