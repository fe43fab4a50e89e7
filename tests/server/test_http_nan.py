"""NaN logits over HTTP: only the affected request fails.

`tests/device/test_nan.py` tests the device side, with captured steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.models.families import config_from_dict
from shared.models.saving import save_checkpoint
from tests.support.http_fixtures import COMPLETIONS, Server, serving
from tests.support.tiny_heads import write_tiny_block, write_tiny_head
from tests.support.tiny_models import tiny_config, tiny_model, tiny_weights, write_tiny
from tests.support.tiny_small import small_config
from tests.support.toy_backend import POISON

TOKEN = 7  # token with a NaN embedding in the tiny models
SENTENCE = "the logits of this request are not finite"
STEP_MS = 5
PLAIN = {
    "temperature": 0,
    "seed": 1,
    "max_tokens": 40,
    "ignore_eos": True,
    "return_token_ids": True,
}


def tokens_beside(server: Server, failing: list[dict[str, Any]]) -> list[Any]:
    """Compares a request's tokens alone and next to failing requests; returns the tokens."""
    neighbour = {"prompt": [20, 31, 42, 53], **PLAIN}
    alone = server.complete(**neighbour)["choices"][0]["token_ids"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.complete(**neighbour)))
    thread.start()
    for body in failing:
        check_failure(server, body)
    thread.join()
    assert found[0]["choices"][0]["token_ids"] == alone
    assert len(alone) == PLAIN["max_tokens"]
    return alone


def check_failure(server: Server, body: dict[str, Any]) -> None:
    """Checks the error of the whole and of the streamed response."""
    answer = server.post(COMPLETIONS, **body)
    assert answer.status_code == 500
    error = {"message": SENTENCE, "type": "server_error", "param": None, "code": None}
    assert answer.json() == {"error": error}
    streamed = server.post(COMPLETIONS, **body, stream=True)
    if streamed.status_code == 200:  # the stream had begun
        assert f'"message":"{SENTENCE}"' in streamed.text
        assert streamed.text.endswith("data: [DONE]\n\n")
    else:
        assert (streamed.status_code, streamed.json()) == (500, {"error": error})


@pytest.mark.parametrize("depth", [pytest.param("0", marks=pytest.mark.matrix), "3"])
def test_nan_request_fails_alone_with_and_without_drafts(depth):
    with serving(
        ["-m", "tests.support.serve_toy", "--step-ms", str(STEP_MS), "--depth", depth]
    ) as server:
        before = server.metrics()
        bad = {"prompt": [5, POISON, 6], "max_tokens": 40}
        tokens_beside(server, [bad, {**bad, "n": 2}, {**bad, "prompt": [[5, 6], [POISON]]}])
        server.wait_for_metric("tandem:num_requests_running", 0)
        after = server.metrics()
        assert after['tandem:request_success_total{finished_reason="error"}'] >= 6
        for name in ("tandem:kv_pages_free", "tandem:request_slots_free"):
            assert after[name] == before[name]


HEADS = {"EAGLE": "llama", "EAGLE3": "qwen3_5", "NAIVE_EAGLE": "llama", "DFLASH": "qwen3_5"}
DRAFTERS = ["none", "NEXTN", "NGRAM", "STANDALONE", *HEADS]


@pytest.fixture(params=DRAFTERS)
def poisoned(request, tmp_path: Path) -> Iterator[Server]:
    """Starts a server of a model with a NaN token that only a logit bias can select."""
    drafter: str = request.param
    family = HEADS.get(drafter, "qwen3_5")
    target, weights = tiny_model(family, 3)
    flags = [] if drafter == "none" else ["--speculative-algorithm", drafter]
    folder, draft = tmp_path / "model", tmp_path / "draft"
    if drafter == "DFLASH":
        write_tiny_block(draft, target, 4)
    elif drafter in HEADS:
        write_tiny_head(draft, target, weights, "EAGLE3" if drafter == "EAGLE3" else "EAGLE", 5)
    elif drafter == "STANDALONE":
        small = small_config(family)
        config = config_from_dict(small)
        save_checkpoint(draft, small, tiny_weights(config, 4))
    if draft.exists():
        flags += ["--speculative-draft-model-path", str(draft)]
    write_tiny(folder, family, 3)
    weights["embed"][TOKEN], weights["lm_head"][TOKEN] = np.nan, 0
    save_checkpoint(folder, tiny_config(family, nested=False, with_mtp=True, tied=False), weights)
    command = ["-m", "torch_impl.serve", "--model-path", str(folder), "--port", "0", *flags]
    with serving(command) as server:
        yield server


@pytest.mark.matrix
def test_nan_request_isolated_for_all_drafters(poisoned):
    chosen = {"prompt": [9, 8], "max_tokens": 8, "logit_bias": {str(TOKEN): 100}}
    tokens_beside(poisoned, [{"prompt": [9, TOKEN, 8], "max_tokens": 8}, chosen])
