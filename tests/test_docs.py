"""Rules for pages: length, lines, headings, links, and a place in the navigation of the site."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from docs.make import site_pages
from tests.support import guarantees, vocabulary
from tests.support.message_templates import nearest, occurs, quoted_messages

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS, MAX_COLUMNS, MAX_LINES_BETWEEN_HEADINGS = 900, 100, 25
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("[B-Z]*.md"),
        *ROOT.glob("bench/*.md"),
        *ROOT.glob("models/*.md"),
    ]
    if path.name != "CHANGELOG.md"
)
NAVIGATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


def prose_of(text: str) -> list[str]:
    """Lines of a page outside generated blocks, code and tables."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!-- (?:Generated|Made) by.*?(?:<!-- End .*?-->|\Z)", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = site_pages.without_code_blocks(text).splitlines()
    return [line for line in lines if not line.lstrip().startswith("|")]


def words_of(text: str) -> int:
    return len(site_pages.plain("\n".join(prose_of(text))).split())


def long_lines_of(text: str) -> int:
    """Lines above the limit; an address may be longer, as it cannot be broken."""
    shortened = (re.sub(r"\]\([^)]*\)|https?://\S+", "", line) for line in prose_of(text))
    return sum(len(line) > MAX_COLUMNS for line in shortened)


def longest_gap_of(text: str) -> int:
    """The number of lines of prose between two headings."""
    lengths = [0]
    for line in filter(str.strip, prose_of(text)):
        lengths = [*lengths, 0] if line.startswith("#") else [*lengths[:-1], lengths[-1] + 1]
    return max(lengths)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short(page: str) -> None:
    assert words_of(read(page)) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_page_has_short_lines(page: str) -> None:
    assert long_lines_of(read(page)) == 0


@pytest.mark.parametrize("page", PAGES)
def test_page_has_enough_headings(page: str) -> None:
    assert longest_gap_of(read(page)) <= MAX_LINES_BETWEEN_HEADINGS


def test_lists_follow_empty_line() -> None:
    """Python-Markdown takes a list for text if it follows a paragraph directly."""
    found = []
    for page in PAGES:
        lines = site_pages.without_code_blocks(read(page)).splitlines()
        for before, line in pairwise(lines):
            is_item = re.match(r"[-*] |\d+\. ", line)
            if is_item and re.match(r"[^\s|<#-]", before) and not re.match(r"[-*] |\d+\. ", before):
                found.append(f"{page}: {line[:60]}")
    assert not found, "\n".join(found)


def anchors_of(page: str) -> set[str]:
    """Anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", site_pages.without_code_blocks(read(page)), re.MULTILINE)
    plain = (site_pages.plain(heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links() -> set[str]:
    """Relative links whose file or heading does not exist."""
    found = set()
    for page in {path for _, path in site_pages.listed(site_pages.expanded(NAVIGATION))} | {*PAGES}:
        for link in site_pages.links(read(page)) if (ROOT / page).is_file() else ():
            anchor = link.partition("#")[2]
            target = page if link.startswith("#") else site_pages.target_of(page, link)
            if target is None:
                continue
            is_page = target.endswith(".md") and (ROOT / target).is_file()
            if not (ROOT / target).exists() or (
                anchor and is_page and anchor not in anchors_of(target)
            ):
                found.add(f"{page} -> {link}")
    return found


def test_links_name_existing_files_and_headings() -> None:
    found = broken_links()
    assert not found, "\n".join(sorted(found))


def test_navigation_lists_every_page() -> None:
    pages = site_pages.unlisted(NAVIGATION)
    assert not pages, f"add to `nav` in mkdocs.yml: {', '.join(pages)}"


def test_navigation_lists_existing_pages_once() -> None:
    paths = [path for _, path in site_pages.listed(site_pages.expanded(NAVIGATION))]
    assert len(paths) == len({*paths})
    missing = [path for path in paths if not (ROOT / path).is_file()]
    assert not missing, f"remove from `nav` in mkdocs.yml: {', '.join(missing)}"


def test_llms_txt_has_one_line_for_each_page() -> None:
    text = site_pages.llms_text("Tandem", NAVIGATION)
    assert text.startswith("# Tandem\n\n> ")
    links = re.findall(r"^- \[.+?\]\((.+?)\)(?:: \S.*)?$", text, re.MULTILINE)
    paths = [path for _, path in site_pages.listed(site_pages.expanded(NAVIGATION))]
    assert links == [path for path in paths if path != site_pages.HOME]
    assert text.count("\n- ") == len(links)


QUOTED_MESSAGES = quoted_messages()


@pytest.mark.parametrize(("page", "message"), QUOTED_MESSAGES)
def test_quoted_message_occurs_in_code(page: str, message: str) -> None:
    assert occurs(message), f"{page} quotes a message that changed; nearest: {nearest(message)!r}"


def test_troubleshooting_quotes_each_message_once() -> None:
    messages = [message for _, message in QUOTED_MESSAGES]
    assert len(messages) >= 60
    assert len(messages) == len({*messages})


PLANTED = """# Title

First sentence of [a page](other.md#part). Second `sentence`.

| a | table |
<!-- made -->
many generated words
<!-- /made -->
```
code
```
%s
""" % ("x" * 101)


def test_modules_named_by_pages_exist() -> None:
    known = [f"/{path}" for path in vocabulary.paths()]
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"`([\w/]+\.py)`", read(page))
        if "NAME" not in name
    }
    assert len(named) > 100
    missing = [f"{page}: {n}" for page, n in named if not any(k.endswith(f"/{n}") for k in known)]
    assert not missing, sorted(missing)


def test_page_rules_on_planted_page() -> None:
    assert words_of(PLANTED) == 10
    assert long_lines_of(PLANTED) == 1
    assert longest_gap_of(PLANTED) == 2
    assert longest_gap_of("# A\n" + "word\n" * 26) == 26
    assert site_pages.links(PLANTED) == ["other.md#part"]
    assert site_pages.links("```\n[a](b)\n```\n`[c](d)` <!-- [e](f) -->") == []


def test_guarantees_collect_tests_of_tables() -> None:
    text = (
        "| a | `tests/a/test_b.py::test_c` and `tests/a/test_d.py` |\nno row `tests/a/test_e.py`\n"
    )
    names = guarantees.named_in(text) | {("tests/a/test_d.py", "test_f")}
    assert guarantees.node_ids(names) == ["tests/a/test_b.py::test_c", "tests/a/test_d.py"]


def test_guarantees_include_failure_modes() -> None:
    named = {name for page in guarantees.pages() for name in guarantees.named_in(page.read_text())}
    main_files = {file for file, _ in guarantees.named_in(read("docs/failure_modes.md"))}
    assert len(main_files) > 10
    assert main_files <= {file for file, _ in named}
    assert len(guarantees.node_ids(named)) > 200
