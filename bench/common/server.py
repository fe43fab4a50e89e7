"""Address of a running server on the command line, and the error for a missing response."""

import argparse
from typing import Any

import httpx

URL = "http://127.0.0.1:8000"
"""Address of `make serve`."""

HIDDEN = argparse.SUPPRESS
"""Help text of hidden aliases."""


def server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a server; see `url_of`."""
    address = {"type": plain_url, "metavar": "URL"}
    parser.add_argument("--base-url", **address, help=f"address of the server (default: {URL})")
    parser.add_argument("--url", **address, dest="base_url", help=HIDDEN)
    parser.add_argument("--host", default="127.0.0.1", help="alternative to --base-url")
    parser.add_argument("--port", type=int, default=8000, help="alternative to --base-url")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--model", help="model name (default: the first of /v1/models)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds without data before a request fails"
    )


def prompt_count(parser: Any, default: int, help: str | None = None) -> None:
    """Adds the option for the number of prompts."""
    parser.add_argument("--num-prompts", type=int, default=default, help=help)
    parser.add_argument("--count", dest="num_prompts", type=int, default=HIDDEN, help=HIDDEN)


def url_of(options: argparse.Namespace) -> str:
    """Returns the address of the server."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return options.base_url or f"http://{host}:{options.port}"


def plain_url(text: str) -> str:
    """Returns an address; the scheme may be missing, and a path `/v1` is removed.

    Raises:
      argparse.ArgumentTypeError: The text is not an address.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        is_address = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        is_address = False
    if not is_address:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as {URL}")
    return url.rstrip("/").removesuffix("/v1")


def headers_of(api_key: str | None) -> dict[str, str]:
    """Returns the headers of a request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def no_answer(url: str, error: Exception) -> str:
    """Returns the sentence for a request that got no answer."""
    if isinstance(error, httpx.HTTPStatusError):
        return error_answer(url, error.response)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"No server answers at {url}: start one with `make serve`."
    if isinstance(error, httpx.TimeoutException):
        return f"The server at {url} did not answer in time; give a longer --timeout."
    if isinstance(error, httpx.HTTPError | httpx.InvalidURL):
        return f"The server at {url} did not answer: {str(error) or type(error).__name__}."
    return f"The server at {url} gave an answer that is not of OpenAI's API: {error!r:.200}."


def error_answer(url: str, response: httpx.Response) -> str:
    """Returns the sentence for an answer that is an error, with the server's own."""
    return f"The server at {url} answered {response.status_code}: {message_of(response)}"


def message_of(response: httpx.Response) -> str:
    """Returns the server's error message, or the beginning of another response."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return response.text[:500] or response.reason_phrase
