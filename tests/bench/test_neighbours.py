"""Benchmark of invalid images: gaps of other streams, and unexpected status codes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.serving import image_interference
from shared.images.data_url import data_of
from shared.images.decode import opened
from tests.support.http_fixtures import IMAGES, save_tokenizer, serving
from tests.support.images import REFUSED

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<|image|>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def test_image_interference_reports_gaps_and_unexpected_status(tmp_path, monkeypatch, capsys):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path), "--sees"]) as server:
        out = tmp_path / "gaps.json"
        words = ["--base-url", server.url, "--rounds", "1", "--max-tokens", "60"]
        assert image_interference.main([*words, "--out", str(out)]) == 0
        told = json.loads(out.read_text())
        assert told["answered_otherwise"] == {}
        assert told["beside"]["longest_ms"] >= told["beside"]["median_ms"] > 0
        assert told["alone"]["events"] > 10
        assert told["first beside"]["longest_ms"] >= told["first beside"]["median_ms"] > 0
        as_good = {"svg": ([REFUSED["svg"][0]], image_interference.OK)}
        monkeypatch.setattr(image_interference, "odd_images", lambda bounds: as_good)
        assert image_interference.main(words) == 1
        assert "svg was answered with 400" in capsys.readouterr().err


@pytest.mark.parametrize("most", [18, 64])
def test_odd_images_valid_for_fixed_image_size(most):
    config = replace(IMAGES, multiple=32, min_pixels=most * 32**2, max_pixels=most * 32**2)
    odd = image_interference.odd_images({"min_tokens": most, "pixels_per_token": 32**2})
    good = [data_of(urls[0]) for urls, want in odd.values() if want == image_interference.OK]
    assert (len(odd), len(good)) == (12, 5)
    for data in good:
        image = opened(data, config)
        assert config.num_tokens(image.height, image.width) == most
