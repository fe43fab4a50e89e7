"""Pages of docs: opening, generated parts, and a test for each invariant."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from docs.make import agreement_table, draw
from shared.options.flags import spelling
from shared.options.options import PARTS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
USER_PAGES = ("http_api", "structured_output", "python", "install", "clients", "failure_modes")
USER_PAGES += ("coming_from_vllm_or_sglang", "faq", "glossary", "speculative_decoding", "tutorial")
USER_PAGES += ("deployment", "troubleshooting", "troubleshooting_requests")
USER_PAGES += ("adaptive_speculation", "draft_heads", "multimodal", "ngram", "quantization")
USER_PAGES += ("scaling_out", "tensor_parallelism", "training_drafts", "training_reference")
INTERNALS = ("architecture", "backend_interface", "dependencies", "drafter_internals", "kernels/*")
INTERNALS += ("model_execution", "numerics", "numerics/*", "scheduler_and_cache", "server")
INTERNALS += ("shadow_verification", "invariants", "invariants/*", "contributing_*")
INTERNALS += (
    "kv_transfer_internals",
    "multimodal_internals",
    "ngram_internals",
    "quantization_internals",
)
INTERNALS += ("structured_output_internals", "tensor_parallelism_internals")
FIGURES = ("kernels/measurements", "rejected_experiments", "rejected_experiments/*")
MAX_SENTENCE_WORDS = 30
OTHER_FLAGS = {"--limit-s", "--only", "--ops", "--print-completion", "--total-s", "--whole"}
OTHER_FLAGS |= {"--config", "--compile-at-once"}
"""Flags of benchmarks, and flags that are no option of the server."""
MEASURED = re.compile(r"\d (?:us|ms|GB/s|TB/s|TFLOP/s)\b|\d times as (?:fast|slow)")


def pages(patterns: tuple[str, ...]) -> list[str]:
    found = (path for pattern in patterns for path in DOCS.glob(f"{pattern}.md"))
    return sorted(path.relative_to(DOCS).as_posix() for path in found)


PAGES = sorted({*pages(USER_PAGES + INTERNALS + FIGURES)})
KERNEL_FOLDERS = sorted({path.parent.name for path in ROOT.glob("kernels/triton_gpu/*/*.py")})
INVARIANTS = [name for name in PAGES if name.startswith("invariants/")]


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def prose(text: str) -> list[str]:
    """Returns the lines of text, with an empty string for each other line."""
    lines, in_code = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append("" if in_code or fence or line.startswith(("|", "#", "<!--")) else line)
        in_code ^= fence
    return lines


def invariants() -> list[tuple[str, str, str]]:
    """Page, sentence and tests of every row."""
    row = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)
    return [
        (name, said, tests)
        for name in INVARIANTS
        for said, tests in row.findall(read(name))
        if said != "invariant"
    ]


@pytest.mark.parametrize("name", PAGES)
def test_page_starts_with_table_image_or_code(name: str) -> None:
    lines = read(name).splitlines()
    assert lines[0].startswith(("# ", "<!--"))
    assert any(line.startswith(("|", "```", "![")) for line in lines[:12])


@pytest.mark.parametrize("name", [name for name in PAGES if name not in INVARIANTS])
def test_page_names_tests_in_tables_only(name: str) -> None:
    assert not re.findall(r"`tests/[^`]*::", "\n".join(prose(read(name))))


@pytest.mark.parametrize("name", sorted({*pages(INTERNALS)} - {*pages(FIGURES)}))
def test_internals_page_has_no_measurements_in_prose(name: str) -> None:
    assert not [line for line in prose(read(name)) if MEASURED.search(line)]


def sentences(text: str) -> list[str]:
    """Returns the sentences of paragraphs and list items, with the addresses of links left out."""
    items = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n", "\n".join(prose(text)), flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n", re.sub(r"\]\([^)]*\)", "]", items))
    return [said for each in paragraphs for said in re.split(r"(?<=[.;:?])\s+", each.strip())]


@pytest.mark.parametrize("name", pages(INTERNALS + FIGURES))
def test_internals_page_has_short_sentences(name: str) -> None:
    said = sentences(read(name))
    assert not [each for each in said if len(each.split()) > MAX_SENTENCE_WORDS]


@pytest.mark.parametrize("name", pages(INTERNALS + FIGURES))
def test_internals_page_names_current_flags(name: str) -> None:
    flags = {spelling(item.name) for part in PARTS.values() for item in fields(part)}
    assert {*re.findall(r"(?<=`)--[a-z][\w-]+", read(name))} <= flags | OTHER_FLAGS


def test_invariants_name_their_tests() -> None:
    rows = invariants()
    assert len(rows) > 200
    assert all("`tests/" in tests for _, _, tests in rows)


def test_invariants_are_unique_with_at_most_45_words() -> None:
    said = [sentence for _, sentence, _ in invariants()]
    assert len(said) == len({*said})
    assert not [sentence for sentence in said if len(sentence.split()) > 45]


def test_invariants_index_links_every_page() -> None:
    linked = re.findall(
        r"^\| \[[^\]]+\]\((invariants/\w+\.md)\)", read("invariants.md"), re.MULTILINE
    )
    assert sorted(linked) == INVARIANTS


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernel_page_lists_every_file_of_its_folder(folder: str) -> None:
    cells = re.findall(r"^\| ([^|]*) \|", read(f"kernels/{folder}.md"), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"(\w+)\.py`", cell)}
    files = (ROOT / "kernels").glob(f"*_gpu/{folder}/*.py")
    assert {path.stem for path in files} - {"__init__"} == listed - {"peer_buffers"}


def test_agreement_tables_equal_results() -> None:
    page = agreement_table.PAGE.read_text(encoding="utf-8")
    assert page == agreement_table.with_tables(page), "run python -m docs.make.agreement_table"


@pytest.mark.parametrize("name", draw.drawings())
def test_drawing_equals_script_output(name: str) -> None:
    drawn = (draw.FOLDER / name).read_text(encoding="utf-8")
    assert drawn == draw.drawings()[name], "run python -m docs.make.draw"


def test_drawn_tree_mask_and_path_are_consistent() -> None:
    """Parents precede children, and the accepted path follows them from the root."""
    assert all(parent < node for node, parent in enumerate(draw.PARENTS))
    assert [draw.PARENTS[node] for node in draw.ACCEPTED] == [-1, *draw.ACCEPTED[:-1]]
    last = draw.ACCEPTED[-1]
    children = [draw.TOKENS[node] for node, parent in enumerate(draw.PARENTS) if parent == last]
    assert draw.BONUS not in children
    assert draw.ancestors(last) == {*draw.ACCEPTED}
