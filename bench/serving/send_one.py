"""One prompt to a running server: latency, tokens, acceptance length and speed.

    python -m bench.serving.send_one --max-tokens 256

Measures the speed of one request, as SGLang's `send_one`; `bench.serving` sends many. The prompt is
one of the shipped word problems or that of `--prompt`. Rounds after the first may hit the prefix
cache; the last round is reported.
"""

import argparse
import asyncio
import sys
import time

from rich.console import Console
from rich.table import Table

from bench.common.server import server_options, url_of
from bench.serving.client import Client, NoServer, Reply, Run
from bench.serving.metrics import summary
from bench.serving.prompt_sets import CHAT, NAMES, RANDOM, Ask, asks
from bench.serving.run import json_object
from bench.serving.table import length_of


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving.send_one", description=(__doc__ or "").splitlines()[0]
    )
    server_options(parser)
    sets = [name for name in NAMES if name != RANDOM]
    parser.add_argument("--prompt", help="user message")
    parser.add_argument("--dataset-name", choices=sets, default="problems")
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="seed of prompt and output")
    parser.add_argument(
        "--rounds", type=int, default=2, help="number of requests; the last one counts"
    )
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--extra-request-body", type=json_object, default={}, metavar="JSON")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be above 0")
    return options


def ask_of(options: argparse.Namespace, model: str) -> Ask:
    """The request."""
    ask = asks(options.dataset_name, 1, options.seed, None)[0]
    if options.prompt is not None:
        ask = Ask(CHAT, {"messages": [{"role": "user", "content": options.prompt}]})
    fields = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    return ask.with_fields(model=model, **fields, **options.extra_request_body)


async def measure(options: argparse.Namespace) -> tuple[Reply, str]:
    """The last reply and its acceptance length.

    Raises:
      NoServer: No server responds.
    """
    async with Client(url_of(options), options.api_key, options.timeout) as client:
        ask = ask_of(options, options.model or await client.model())
        for _ in range(options.rounds):
            before = await client.accept_counters()
            reply = await client.ask(ask, options.stream, time.perf_counter())
        after = await client.accept_counters()
    run = Run([reply], reply.ended_s)
    return reply, length_of(summary(run, options.stream, before, after))


def main(arguments: list[str] | None = None) -> int:
    """Prints the answer and the table; the exit code is 1 where it failed, 2 without a server."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        reply, length = asyncio.run(measure(options))
    except NoServer as error:
        print(error, file=sys.stderr)
        return 2
    if reply.error:
        print(f"the request failed: {reply.error}: {reply.reason}", file=sys.stderr)
        return 1
    console, table = Console(), Table()
    console.print(reply.text, markup=False, highlight=False)
    for heading in ("Latency (s)", "Tokens", "Acc Length", "Speed (token/s)"):
        table.add_column(heading, justify="right")
    speed = reply.tokens / reply.ended_s
    table.add_row(f"{reply.ended_s:.3f}", str(reply.tokens), length, f"{speed:.2f}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
