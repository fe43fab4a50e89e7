"""Streams a chat completion from a running server with httpx.

`make serve` in one terminal, `python -m examples.stream_http` in another; `--base-url` sets the
address of another server.
"""

import argparse
import json
from collections.abc import Iterator

import httpx

from bench.common.server import HIDDEN, headers_of, no_answer, plain_url, server_options, url_of

QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there?"


def events(options: argparse.Namespace) -> Iterator[dict]:
    """Yields the events of one chat completion."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    body |= {"model": options.model} if options.model else {}
    how = {"headers": headers_of(options.api_key), "timeout": options.timeout}
    url = f"{url_of(options)}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, **how) as answer:
        if answer.is_error:
            answer.read()  # loads the error message of the server
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def main(options: argparse.Namespace) -> None:
    """Prints the text of each event as it arrives."""
    for event in events(options):
        if "error" in event:
            raise SystemExit(event["error"]["message"])
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    server_options(parser)
    parser.add_argument("old_url", nargs="?", type=plain_url, help=HIDDEN)
    given = parser.parse_args()
    given.base_url = given.base_url or given.old_url
    try:
        main(given)
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise SystemExit(no_answer(url_of(given), error)) from None
