"""The page of what was measured on a GPU."""

from pathlib import Path
from typing import Any

from bench import performance

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"


def line(backend: str, ms: float, **other: Any) -> dict[str, Any]:
    """A line as `bench.steps.decode_steps` writes it."""
    usual = {
        "drafts": "none",
        "batch": 8,
        "prompt": 512,
        "temperature": 0.0,
        "top_p": 1.0,
        "overlap": 1,
        "dtype": "bfloat16",
        "limit_ms": 2.0,
        "load_s": 1.0,
        "prepare_s": 4.0,
        "planned_bytes": 16e9,
        "peak_bytes": 16.25e9,
        "trace": {"kernels": 200.0, "idle_share": 0.011},
        "texts": None,
    }
    found = {"backend": backend, "ms": ms} | usual | other
    return found | {"share_of_limit": found["limit_ms"] / ms}


def file(*lines: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": "python -m bench.steps.decode_steps --model bench/shapes/qwen3-8b",
        "sides": {"torch": {"device": "NVIDIA H200"}},
        "lines": list(lines),
    }


def rendered(*files: dict[str, Any]) -> str:
    peers = performance.Found.of_results().peers
    return performance.render(performance.Found(offline=files, peers=peers))


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == performance.render(performance.Found.of_results())


def test_the_readme_has_the_numbers_of_the_results() -> None:
    table = performance.speed(performance.Found.of_results())
    assert f"<!-- speed -->\n{table}\n<!-- /speed -->" in README.read_text(encoding="utf-8")
    assert "| qwen3-8b | none | 1 / 8 / 32 | " in table


def test_a_file_of_another_engine_says_how_it_was_measured() -> None:
    peers = performance.Found.of_results().peers
    assert {file["engine"] for file in peers} == {"vLLM", "SGLang"}
    for file in peers:
        assert file["version"]
        assert file["device"]
        assert file["command"] or file["note"]


def test_a_flag_that_makes_another_model_has_a_chapter_of_its_own() -> None:
    codes = file(line("torch", 3.0))
    codes["command"] += " --flags=--fp8-activations"
    page = rendered(file(line("torch", 4.0)), codes)
    widened, in_codes = page.split("## qwen3-8b --fp8-activations, NVIDIA H200, bfloat16, ")
    assert "## qwen3-8b, NVIDIA H200, bfloat16, " in widened
    assert "| 4.00 |" in widened
    assert "| 3.00 |" not in widened
    assert "| 3.00 |" in in_codes


def test_prompts_have_a_chapter_where_no_step_was_measured() -> None:
    prompt = {"drafts": "none", "backend": "torch", "flags": [], "prompt": 512, "is_same": True}
    found = file(prompt | {"ms": 14.0, "products_ms": 7.0})
    page = performance.render(performance.Found(offline=[], prefill=[found]))
    assert "## qwen3-8b, NVIDIA H200\n\nMilliseconds until the first token" in page
    assert "| none | 512 | 14.0 | - | - | 7.0 | 50% | - | same |" in page
    assert "a decode step, greedy" not in page


def test_backends_stand_side_by_side_with_what_others_take() -> None:
    page = rendered(
        file(line("torch", 4.0), line("jax", 2.5, texts={"equal": True})),
        file(line("torch", 8.0, batch=1, trace=None)),
    )
    first, second = (
        each for each in page.splitlines() if each.startswith("| none | ") and "%" in each
    )
    cells = [cell.strip() for cell in second.split("|")[1:-1]]
    assert cells[:8] == ["none", "8", "2.00", "4.00", "2.50", "5.56", "5.57", "80%"]
    assert cells[8:] == ["200", "200", "1.1%", "1.1%", "equal"]
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells[:5] == ["none", "1", "2.00", "8.00", "-"]
    assert cells[8:] == ["-", "-", "-", "-", "-"]


def test_a_temperature_stands_beside_its_greedy_line() -> None:
    warm = {"temperature": 0.8, "top_p": 0.95}
    page = rendered(
        file(line("torch", 4.0), line("torch", 4.1, **warm), line("torch", 4.4, overlap=0))
    )
    assert "| none | 8 | 0.8, top-p 0.95 | 1 | 4.10 (+2.5%) | - | - |" in page
    assert "| none | 8 | 0 | 0 | 4.40 (+10.0%) | - | - |" in page


def test_texts_that_differ_are_told() -> None:
    page = rendered(file(line("torch", 4.0), line("jax", 4.0, texts={"equal": False})))
    assert "| DIFFER |" in page


def test_long_prompts_stand_beside_each_other_and_apart_from_short_ones() -> None:
    long = [
        file(line("torch", 6.7, prompt=261888)),
        file(line("torch", 5.5, prompt=130944), line("jax", 5.6, prompt=130944)),
    ]
    page = performance.render(performance.Found(offline=[file(line("torch", 4.0))], long=long))
    assert "512 tokens in" in page.partition("Milliseconds a decode step, greedy.")[0]
    rows = [each for each in page.splitlines() if each.startswith("| none | 8 | 130944")]
    assert rows == ["| none | 8 | 130944 | 2.00 | 5.50 | 5.60 | 36% | - |"]
    assert page.index("130944") < page.index("261888")


def test_hits_are_told_with_how_much_faster_they_are() -> None:
    hit = {"drafts": "none", "backend": "torch", "prefix": 4100, "cached_tokens": 4096}
    hit |= {"ms": 115.1, "hit_ms": 11.5, "times": 10.01, "is_same": True}
    found = performance.Found(offline=[file(line("torch", 4.0))], hits=[file(hit)])
    assert "| none | torch | 4100 | 4096 | 115.1 | 11.5 | 10.0x | same |" in performance.render(
        found
    )


def test_changing_work_has_a_line_for_each_drafter_and_work() -> None:
    def line(phase: str, by_best: float, by_off: float) -> dict[str, Any]:
        speeds = {"off": 100.0, "S3": 200.0, "greedy": 150.0, "probe": 190.0, "adaptive": 196.0}
        shares = {"adaptive_by_best": by_best, "adaptive_by_off": by_off}
        return {"phase": phase, "tokens_per_s": speeds} | shares

    lines = [line("copying", 0.99, 2.1), line("chats", 0.97, 1.4), line("all", 0.98, 1.96)]
    start = {"drafts": "NEXTN", "backend": "jax", "device": "NVIDIA H200", "imposed": lines}
    plain = [{**each, "tokens_per_s": {"off": 100.0, "adaptive": 196.0}} for each in lines]
    alone = {"drafts": "NGRAM", "backend": "torch", "device": None, "lines": plain}
    command = "python -m bench.speculation.adaptive --model models/demo/target"
    changing = {"command": command, "file": "adaptive_x.json", "starts": [start, alone]}
    page = performance.render(performance.Found(offline=[], adaptive=[changing]))
    shares = "0.980 | 0.970 | 1.960 | 1.400"
    assert (
        f"| NEXTN | target | jax | NVIDIA H200 | imposed | {shares} | 0.750 | 0.950 "
        "| `adaptive_x.json` |" in page
    )
    assert f"| NGRAM | target | torch | a CPU | served | {shares} | - | - |" in page


def test_the_hosts_part_of_a_step_stands_beside_the_device() -> None:
    line = {"controller": "adaptive", "cache": "on", "rows": 32, "host_us": 412.3}
    line |= {"device_ms": 6.0, "share": 0.0687}
    host = {
        "command": "python -m bench.speculation.host_overhead",
        "python": "3.12.1",
        "lines": [line],
    }
    page = performance.render(performance.Found(offline=[], host=[host]))
    assert "| adaptive | on | 32 | 412 | 6.0 | 6.9% |" in page
    assert "Work that changes" not in page
