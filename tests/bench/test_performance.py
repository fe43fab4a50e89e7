"""The pages on performance: tables, ratios, the chart and the README's blocks."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from bench import performance
from bench.pages import host, results, side_by_side, summary, tables
from bench.pages.results import Found, Subject

DOCS, README = performance.DOCS, performance.README
SUBJECT = Subject("qwen3-8b", "NVIDIA H200")
PAGES = [name for name in performance.pages(Found.of_results()) if name.endswith(".md")]


def line(backend: str, ms: float, **other: Any) -> dict[str, Any]:
    """A line as `bench.steps.decode_steps` writes it."""
    usual = {
        "drafts": "none",
        "batch": 8,
        "prompt": 512,
        "temperature": 0.0,
        "top_p": 1.0,
        "overlap": 1,
        "ranks": 1,
        "limit_ms": 2.0,
        "trace": {"kernels": 200.0, "idle_share": 0.011},
        "texts": None,
    }
    found = {"backend": backend, "ms": ms} | usual | other
    return found | {"share_of_limit": found["limit_ms"] / ms}


def file(*lines: dict[str, Any], **other: Any) -> dict[str, Any]:
    command = "python -m bench.steps.decode_steps --model bench/shapes/qwen3-8b"
    file = {"command": command, "revision": "abc1234", "date": "2026-11-26", "file": "a.json"}
    return file | {"sides": {"torch": {"device": "NVIDIA H200"}}, "lines": list(lines)} | other


def peer(engine: str, ms: float, batch: int = 8) -> dict[str, Any]:
    head = {"engine": engine, "version": "1", "model": "qwen3-8b", "device": "NVIDIA H200"}
    return head | {"lines": [{"drafts": "none", "batch": batch, "ms": ms}]}


def rows_of(parts: list[str]) -> list[str]:
    return [row for part in parts for row in part.splitlines() if row.startswith("| ")][2:]


def test_pages_and_chart_equal_generator_output() -> None:
    for name, text in performance.pages(Found.of_results()).items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run python -m bench.performance"


def _readme_blocks(found: Found) -> list[tuple[str, str]]:
    table = summary.speed(found, in_readme=True)
    return [("speed", table), ("slower", side_by_side.slower(found))]


def test_readme_blocks_equal_generator_output() -> None:
    found, readme = Found.of_results(), README.read_text(encoding="utf-8")
    for name, block in _readme_blocks(found):
        assert f"<!-- {name} -->\n{block}\n<!-- /{name} -->" in readme


@pytest.mark.parametrize("name", PAGES)
def test_every_measured_table_states_card_date_and_revision(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    tables_of = re.findall(r"^### .+\n\n((?:.+\n)+)\n\| ", text, re.M)
    assert len(tables_of) == text.count("\n### ")
    for stamp in tables_of:
        assert re.match(r"Measured on [^:]+:\s\d{4}-\d\d-\d\d\s\([0-9a-f]{7}", stamp)


def test_results_read_rejects_file_without_revision(tmp_path: Path) -> None:
    path = tmp_path / "offline_x.json"
    path.write_text('{"date": "2026-11-26", "lines": []}')
    with pytest.raises(ValueError, match=r"offline_x\.json has no revision"):
        results.read(path)


def test_peer_files_describe_their_measurement() -> None:
    peers = Found.of_results().peers
    assert {file["engine"] for file in peers} == {"vLLM", "SGLang"}
    for file in peers:
        assert file["version"]
        assert file["device"]
        assert file["command"] or file["note"]


def test_greedy_steps_row_contains_backends_and_peers() -> None:
    own = file(line("torch", 4.0), line("jax", 2.5, texts={"equal": True}))
    found = Found(decode=[own], peers=[peer("vLLM", 5.56)])
    (row,) = rows_of(tables.greedy_steps(found, SUBJECT))
    assert row == "| none | 8 | 2.00 | 4.00 | 2.50 | 5.56 | 80% | equal | abc1234 |"


def test_unequal_outputs_are_marked() -> None:
    own = file(line("torch", 4.0), line("jax", 4.0, texts={"equal": False}))
    (row,) = rows_of(tables.greedy_steps(Found(decode=[own]), SUBJECT))
    assert "| DIFFER |" in row


def test_newest_line_of_equal_settings_counts() -> None:
    new = file(line("torch", 3.0), date="2026-11-27", revision="fff0000")
    (row,) = rows_of(tables.greedy_steps(Found(decode=[new, file(line("torch", 4.0))]), SUBJECT))
    assert "| 3.00 |" in row
    assert row.endswith("| fff0000 |")


def test_variants_show_change_from_greedy_step() -> None:
    warm = {"temperature": 0.8, "top_p": 0.95}
    own = file(line("torch", 4.0), line("torch", 4.1, **warm), line("torch", 4.4, overlap=0))
    sampled, apart = sorted(rows_of(tables.variants(Found(decode=[own]), SUBJECT)), reverse=True)
    assert sampled == "| none | 8 | 0.8, top-p 0.95 | 1 | 4.10 (+2.5%) | - | - | abc1234 |"
    assert apart == "| none | 8 | 0 | 0 | 4.40 (+10.0%) | - | - | abc1234 |"


@pytest.mark.parametrize(
    ("revision", "shown"),
    [("abc1234", "4.40 (+10.0%)"), ("fff0000", "4.40"), ("abc1234+", "4.40")],
)
def test_lines_of_two_revisions_are_not_divided(revision: str, shown: str) -> None:
    other = file(line("torch", 4.4, overlap=0), revision=revision, file="b.json")
    found = Found(decode=[file(line("torch", 4.0)), other])
    (row,) = rows_of(tables.variants(found, SUBJECT))
    assert f"| 0 | {shown} | - |" in row


@pytest.mark.parametrize(("revision", "shown"), [("abc1234", "2.00 (2.00x)"), ("fff0000", "2.00")])
def test_speedup_of_two_gpus_needs_one_revision(revision: str, shown: str) -> None:
    two = file(line("torch", 2.0, ranks=2), revision=revision, file="b.json")
    found = Found(tp=[file(line("torch", 4.0)), two])
    (row,) = rows_of(tables.tp_steps(found, SUBJECT))
    assert f"| 4.00 | {shown} |" in row


def test_fp8_activations_make_another_model() -> None:
    codes = file(line("torch", 3.0))
    codes["command"] += " --flags=--fp8-activations"
    found = Found(decode=[file(line("torch", 4.0)), codes])
    models = [subject.model for subject in results.subjects_of(found.decode)]
    assert models == ["qwen3-8b", "qwen3-8b --fp8-activations"]
    (row,) = rows_of(tables.greedy_steps(found, SUBJECT))
    assert "| 4.00 |" in row


def test_prefill_page_needs_no_decode_steps() -> None:
    prompt = {"drafts": "none", "backend": "torch", "flags": [], "prompt": 512, "is_same": True}
    found = Found(prefill=[file(prompt | {"ms": 14.0, "products_ms": 7.0})])
    pages = performance.pages(found)
    assert (
        "| none | 512 | 14.0 | - | - | 7.0 | 50% | - | same | abc1234 |"
        in (pages["performance_prefill.md"])
    )
    assert "### Decode step" not in pages["performance.md"]


def test_long_contexts_are_sorted_by_length() -> None:
    long = [
        file(line("torch", 6.7, prompt=261888)),
        file(line("torch", 5.5, prompt=130944), line("jax", 5.6, prompt=130944)),
    ]
    rows = rows_of(tables.long_contexts(Found(long=long), SUBJECT))
    assert rows[0] == "| none | 8 | 130944 | 2.00 | 5.50 | 5.60 | 36% | - |"
    assert rows[1].startswith("| none | 8 | 261888 |")


def test_hits_have_their_speedup() -> None:
    hit = {"drafts": "none", "backend": "torch", "prefix": 4100, "cached_tokens": 4096}
    hit |= {"ms": 115.1, "hit_ms": 11.5, "times": 10.01, "is_same": True}
    (row,) = rows_of(tables.hits(Found(hits=[file(hit)]), SUBJECT))
    assert row == "| none | torch | 4100 | 4096 | 115.1 | 11.5 | 10.0x | same |"


def test_adaptive_table_row_per_drafter_and_work() -> None:
    def phase(name: str, by_best: float, by_off: float) -> dict[str, Any]:
        speeds = {"off": 100.0, "S3": 200.0, "greedy": 150.0, "probe": 190.0, "adaptive": 196.0}
        shares = {"adaptive_by_best": by_best, "adaptive_by_off": by_off}
        return {"phase": name, "tokens_per_s": speeds} | shares

    lines = [phase("copying", 0.99, 2.1), phase("chats", 0.97, 1.4), phase("all", 0.98, 1.96)]
    start = {"drafts": "NEXTN", "backend": "jax", "device": "NVIDIA H200", "imposed": lines}
    plain = [{**each, "tokens_per_s": {"off": 100.0, "adaptive": 196.0}} for each in lines]
    alone = {"drafts": "NGRAM", "backend": "torch", "device": None, "lines": plain}
    command = "python -m bench.speculation.adaptive --model models/demo/target"
    changing = file() | {"command": command, "starts": [start, alone]}
    first, second = rows_of(host.adaptive(Found(adaptive=[changing])))
    shares = "0.980 | 0.970 | 1.960 | 1.400"
    others = "0.750 | 0.742 | 0.950 | 0.940"
    assert first == f"| NEXTN | target | jax | NVIDIA H200 | imposed | {shares} | {others} |"
    assert second == f"| NGRAM | target | torch | CPU | served | {shares} | - | - | - | - |"


def test_host_table_shows_share_of_step() -> None:
    times = {"controller": "adaptive", "cache": "on", "rows": 32, "host_us": 412.3}
    times |= {"device_ms": 6.0, "share": 0.0687}
    (row,) = rows_of(host.host_times(Found(host=[file(times) | {"python": "3.12.1"}])))
    assert row == "| adaptive | on | 32 | 412 | 6.0 | 6.9% |"


def beside(ms: float, torch: float, jax: float, **other: Any) -> dict[str, Any]:
    """A peer file with one line that was measured next to both backends."""
    given = peer("SGLang", ms) | {"gpus": 1, "revision": "abc1234", "date": "2026-11-26"}
    given["lines"] = [given["lines"][0] | {"own": {"torch": torch, "jax": jax}} | other]
    return given


def test_slower_names_exactly_cells_measured_together() -> None:
    found = Found(peers=[beside(5.0, 4.0, 6.0), peer("vLLM", 1.0)])
    assert " ".join(side_by_side.slower(found).split()).startswith(
        "Measured in one call, another engine is faster in 1 of 2 cells: "
        "qwen3-8b, none, batch 8 (jax)."
    )
    assert "faster in all 2 cells" in side_by_side.slower(Found(peers=[beside(7.0, 4.0, 6.0)]))


def test_side_by_side_omits_ratio_of_waiting_host() -> None:
    rows = rows_of(side_by_side.side_by_side(Found(peers=[beside(5.0, 4.0, 8.0)])))
    assert rows == ["| qwen3-8b, none | 8 | 5.00 | 4.00 | 8.00 | 1.25 | 0.62 |"]
    waiting = Found(peers=[beside(5.0, 4.0, 8.0, note="waits")])
    assert rows_of(side_by_side.side_by_side(waiting))[0].endswith("| 8.00 | - | - |")
    assert "all 0 cells" in side_by_side.slower(waiting)


def test_summary_has_no_engine_with_equal_prompts() -> None:
    own = file(line("torch", 4.0), line("jax", 6.0), line("torch", 4.0, batch=1))
    peers = [peer("vLLM", 5.0) | {"prompts": "equal"}, peer("SGLang", 7.0)]
    found = Found(decode=[own], peers=peers)
    (row,) = rows_of([summary.speed(found, in_readme=True)])
    assert row.endswith("| none | 4.00 / 4.00 / - | - / 6.00 / - | - / 7 / - |")
    assert "| vLLM 1, equal prompts |" in "".join(tables.greedy_steps(found, SUBJECT))


def test_summary_prefers_simulated_acceptance_and_marks_its_absence() -> None:
    own = file(
        line("torch", 4.0, drafts="DFLASH L=2.5"),
        line("torch", 3.0, drafts="DFLASH"),
        line("jax", 3.0, drafts="DFLASH"),
    )
    found = Found(decode=[own], peers=[peer("vLLM", 5.0)])
    (row,) = rows_of([summary.speed(found, in_readme=False)])
    assert "| - / 4.00 / - | - / 3.00° / - |" in row


def test_chart_has_bar_for_each_summary_number() -> None:
    found = Found.of_results()
    rows = [row for row in summary.rows_of(found) if row.peers]
    numbers = [ms for row in rows for known in row.peers.values() for ms in known.values()]
    numbers += [each["ms"] for row in rows for side in row.own.values() for each in side.values()]
    root = ET.fromstring(performance.pages(found)[performance.CHART])
    space = {"s": "http://www.w3.org/2000/svg"}
    bars = root.findall("s:rect/s:title", space)
    assert sorted(bar.text.split(": ")[1] for bar in bars if bar.text) == sorted(
        f"{ms:.2f} ms" for ms in numbers
    )
