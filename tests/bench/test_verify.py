"""The bench that asks a running server twice: it finds the token that differs, and none besides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.common.server import URL, url_of
from bench.quality import verify
from shared.server.engine_link.server_metrics import PREFIX
from tests.support.http_fixtures import LIE, Server, save_tokenizer, serving
from tests.support.tiny_models import write_tiny

PROMPTS = [
    {"prompt": "abcdefgh", "temperature": 0},
    {"messages": [{"role": "user", "content": "who?"}], "temperature": 1.0},
    {"prompt": [97, 98, 99], "max_tokens": 3},
]
WRONG_AT = 4
KEY = "a key"
# Logprobs of the fixture's engine are ids divided by -256.
MARGIN = 1 / 256


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """A correct server, and one with a wrong fifth token if drafts are allowed."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    command = ["-m", "tests.support.http_fixtures", str(folder), "--api-key", KEY]
    with ExitStack() as stack:
        honest = stack.enter_context(serving(command))
        yield honest, stack.enter_context(serving([*command, "--wrong-at", str(WRONG_AT)]))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)) + "\n")
    return path


def run(folder: Path, prompts: Path, *flags: str) -> tuple[int, dict]:
    out = folder / "found.json"
    words = ["--prompts", str(prompts), "--max-tokens", "8", "--api-key", KEY, "--out", str(out)]
    code = verify.main([*flags, *words])
    return code, json.loads(out.read_text())


def test_verify_equal_server_reports_no_divergence(servers, prompts, tmp_path, capsys):
    honest, _ = servers
    for flags in ([], ["--against", honest.url]):
        code, found = run(tmp_path, prompts, "--base-url", honest.url, *flags)
        assert code == 0
        assert (found["checked"], found["equal"], found["tokens"]) == (3, 3, 19)
        assert found["accept_length"] == 3.0
        assert found["divergences"] == []
    assert KEY not in json.dumps(found)
    assert "| 3 | 3 | 19 | 3.0 |" in capsys.readouterr().out


@pytest.mark.parametrize("against", [False, True], ids=["plainly", "another server"])
def test_verify_reports_divergence_with_position_and_margin(
    servers, prompts, tmp_path, against, capsys
):
    honest, lying = servers
    flags = ["--against", honest.url] if against else []
    code, found = run(tmp_path, prompts, "--url", lying.url, *flags)
    assert code == 1
    assert (found["checked"], found["equal"]) == (3, 1)  # one text is over by then
    first, second = found["divergences"]
    assert (first["prompt"], first["position"], first["served"]) == (0, WRONG_AT, LIE)
    assert first["other"] == ord("e")
    assert second["prompt"] == 1
    assert first["margin"] == pytest.approx(MARGIN)
    assert second["margin"] == pytest.approx(MARGIN)
    assert f"| 0 | {WRONG_AT} | {LIE} | {ord('e')} | 0.00390625 |" in capsys.readouterr().out


def test_first_difference_of_shorter_output_is_its_end():
    long, short = verify.Text([1, 2, 3], [0.5, 0.5, 0.25], 1, 0), verify.Text([1, 2], [], 1, 0)
    expected = verify.Divergence(prompt=7, position=2, served=None, other=3, margin=0.25)
    assert verify.first_difference(7, short, long) == expected
    assert verify.first_difference(7, long, long) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "no object with either messages or prompt"),
        ('{"prompt": "a", "messages": []}', "no object with either"),
        ('{"prompt": "a", "n": 2}', "has n"),
        ("no", "cannot be read as lines of JSON"),
    ],
)
def test_verify_rejects_invalid_prompt_line(line, words, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text(line)
    nowhere = ["--url", "http://127.0.0.1:9", "--prompts", str(tmp_path / "prompts.jsonl")]
    assert verify.main(nowhere) == 2
    assert words in capsys.readouterr().err


def test_verify_reports_server_errors(servers, prompts, capsys):
    honest, _ = servers
    words = ["--base-url", honest.url, "--prompts", str(prompts), "--api-key"]
    assert verify.main([*words, "no"]) == 2
    assert f"The server at {honest.url} answered 401: " in capsys.readouterr().err
    assert verify.main([*words, KEY, "--model", "gpt"]) == 2
    assert "answered 404: the model 'gpt' does not exist" in capsys.readouterr().err
    assert verify.main(["--port", "9", "--prompts", str(prompts)]) == 2
    wanted = "No server answers at http://127.0.0.1:9: start one with `make serve`.\n"
    assert capsys.readouterr().err == wanted


def test_verify_defaults_match_make_serve():
    given = verify.parser().parse_args([])
    assert (url_of(given), given.num_prompts, given.max_concurrency) == (URL, 20, 8)
    older = verify.parser().parse_args(["--url", "host:7/v1", "--count", "3", "--concurrency", "2"])
    assert (url_of(older), older.num_prompts, older.max_concurrency) == ("http://host:7", 3, 2)


def test_verify_and_shadow_verification_of_real_server(prompts, tmp_path):
    write_tiny(tmp_path / "tiny", "qwen3_5", 3)
    save_tokenizer(tmp_path / "tiny")
    command = ["-m", "tests.support.serve_reference", "--port", "0"]
    command += ["--model-path", str(tmp_path / "tiny"), "--speculative-algorithm", "NEXTN"]
    with serving([*command, "--shadow-verify-rate", "1"]) as server:
        code, found = run(tmp_path, prompts, "--url", server.url)
        assert (code, found["equal"]) == (0, 3)
        # Each prompt was sent twice.
        server.wait_for_metric(f'{PREFIX}shadow_verify_requests_total{{result="match"}}', 6)
        metrics = server.metrics()
        assert metrics[f'{PREFIX}shadow_verify_requests_total{{result="mismatch"}}'] == 0
        assert metrics[f'{PREFIX}shadow_verify_requests_total{{result="dropped"}}'] == 0
