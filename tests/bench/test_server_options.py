"""Server options and error messages shared by the benchmark commands."""

import argparse
import io

import httpx
import pytest
from rich.console import Console

from bench.common.server import URL, no_answer, plain_url, prompt_count, server_options, url_of
from bench.common.waiting import progress
from bench.serving import image_interference, run, send_one

REQUEST = httpx.Request("GET", URL)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    server_options(made)
    prompt_count(made, 5)
    return made


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ([], URL),
        (["--port", "7"], "http://127.0.0.1:7"),
        (["--host", "::1"], "http://[::1]:8000"),
        (["--base-url", "host:7"], "http://host:7"),
        (["--base-url", "https://host/v1/"], "https://host"),
        (["--url", "http://host/"], "http://host"),
    ],
)
def test_url_of_accepts_every_address_spelling(words, url):
    assert url_of(parser().parse_args(words)) == url


@pytest.mark.parametrize("text", ["ftp://host", "http://", "http://[::", "http://host:port"])
def test_plain_url_rejects_invalid_address(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not an address such as http"):
        plain_url(text)


def test_earlier_flag_spellings_accepted_and_hidden():
    assert parser().parse_args(["--count", "3"]).num_prompts == 3
    assert parser().parse_args([]).num_prompts == 5
    assert "--count" not in parser().format_help()
    assert "--url" not in parser().format_help()


@pytest.mark.parametrize("command", [run, send_one, image_interference])
def test_server_commands_share_options(command):
    words = ["--url", "host:7", "--api-key", "k", "--model", "m", "--timeout", "3"]
    given = command.parse(words)
    assert (url_of(given), given.api_key, given.model) == ("http://host:7", "k", "m")


def failed(content: bytes) -> httpx.HTTPStatusError:
    answer = httpx.Response(400, content=content, request=REQUEST)
    return httpx.HTTPStatusError("", request=REQUEST, response=answer)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (httpx.ConnectError("refused"), "No server answers at URL: start one with `make serve`."),
        (httpx.ReadTimeout(""), "The server at URL did not answer in time; give a longer"),
        (httpx.ReadError(""), "The server at URL did not answer: ReadError."),
        (httpx.RemoteProtocolError("cut"), "The server at URL did not answer: cut."),
        (failed(b'{"error": {"message": "too long"}}'), "The server at URL answered 400: too long"),
        (failed(b'{"error": "too long"}'), "The server at URL answered 400: too long"),
        (failed(b"<html>"), "The server at URL answered 400: <html>"),
        (failed(b""), "The server at URL answered 400: Bad Request"),
        (KeyError("data"), "The server at URL gave an answer that is not of OpenAI's API: Key"),
    ],
)
def test_no_answer_states_reason(error, sentence):
    assert no_answer("URL", error).startswith(sentence)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_shown_with_and_without_terminal(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with progress("answers", 3, console, every_s=0.0) as done:
        done()
        done()
    assert ("2/3" if is_terminal else "2 of 3 answers, 0 s\n") in console.file.getvalue()
