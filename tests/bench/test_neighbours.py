"""The bench of odd pictures: it tells a stream's gaps, and what was answered otherwise."""

from __future__ import annotations

import json

from bench.serving import neighbours
from tests.support.http_fixtures import save_tokenizer, serving
from tests.support.pictures import REFUSED

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<|image|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def test_gaps_are_told_and_an_answer_of_another_status_is_named(tmp_path, monkeypatch, capsys):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path), "--sees"]) as server:
        out = tmp_path / "gaps.json"
        words = ["--base-url", server.url, "--rounds", "1", "--max-tokens", "60"]
        assert len(neighbours.ODD) == 12
        assert neighbours.main([*words, "--out", str(out)]) == 0
        told = json.loads(out.read_text())
        assert told["beside"]["longest_ms"] >= told["beside"]["median_ms"] > 0
        assert told["alone"]["events"] > 10
        as_good = {"svg": ([REFUSED["svg"][0]], neighbours.OK)}
        monkeypatch.setattr(neighbours, "ODD", as_good)
        assert neighbours.main(words) == 1
        assert "svg was answered with 400" in capsys.readouterr().err
