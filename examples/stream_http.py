"""Streams an answer of a running server, as any client of OpenAI's API does, by httpx alone.

`make serve` in one terminal, `python -m examples.stream_http [URL]` in another.
"""

import argparse
import json
from collections.abc import Iterator

import httpx

QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there?"


def events(url: str) -> Iterator[dict]:
    """The events of one chat."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def main(url: str) -> None:
    """Prints the answer as it comes."""
    for event in events(url):
        for choice in event["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    try:
        main(given.url)
    except httpx.ConnectError:
        raise SystemExit(f"nobody answers at {given.url}; start a server first") from None
