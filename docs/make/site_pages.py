"""Pages of the documentation site: their order, titles, summaries and links.

The site has the layout of the repository, so that relative links between pages are valid in both.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
Entry = str | dict[str, Any]
_CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_NO_PARAGRAPH = ("#", "|", "<", "!", "- ", "* ", "```", "> ", "1. ")


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
      path: Path from the root of the repository.
      title: Its first heading.
      summary: The first sentence below that heading; empty if there is no paragraph.
    """

    path: str
    title: str
    summary: str


def read(path: str) -> Page:
    """Reads the title and summary of a page.

    Raises:
      ValueError: The page has no heading of the first level.
    """
    text = _COMMENT.sub("", (ROOT / path).read_text(encoding="utf-8"))
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    if heading is None:
        raise ValueError(f"{path} has no heading of the first level")
    blocks = re.split(r"\n\s*\n", without_code_blocks(text[heading.end() :]))
    for block in map(str.strip, blocks):
        if block and not block.startswith(_NO_PARAGRAPH):
            return Page(path, plain(heading[1]), _first_sentence(plain(block)))
    return Page(path, plain(heading[1]), "")


def plain(text: str) -> str:
    """The text of a paragraph without links, emphasis and line breaks."""
    return " ".join(_LINK.sub(r"\2", text).replace("**", "").split())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.:?!])\s+(?=[A-Z`\"])", text, maxsplit=1)[0].rstrip(":")


def without_code_blocks(text: str) -> str:
    """A page without its fenced code."""
    return _FENCE.sub("", text)


def expanded(entries: list[Entry]) -> list[Entry]:
    """Replaces each pattern of a navigation with the matching pages that have no other place."""
    taken = {path for _, path in listed(entries)}
    return _expanded(entries, taken)


def _expanded(entries: list[Entry], taken: set[str]) -> list[Entry]:
    found = list[Entry]()
    for entry in entries:
        if isinstance(entry, dict):
            found.append({title: _expanded(inner, taken) for title, inner in entry.items()})
        elif "*" in entry:
            paths = sorted(ROOT.glob(entry), key=lambda path: (path.stem != "index", path))
            names = [path.relative_to(ROOT).as_posix() for path in paths]
            found += [name for name in names if name not in taken]
            taken.update(names)
        else:
            found.append(entry)
    return found


def listed(entries: list[Entry]) -> Iterator[tuple[str, str]]:
    """Yields the section and path of each page of an expanded navigation."""
    for entry in entries:
        if isinstance(entry, str):
            yield "", entry
            continue
        for section, inner in entry.items():
            yield from ((section, path) for _, path in listed(inner))


def unlisted(entries: list[Entry]) -> list[str]:
    """Pages of `docs/` that a navigation lacks."""
    known = {path for _, path in listed(expanded(entries))}
    pages = (path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
    return [page for page in pages if page not in known]


def links(text: str) -> list[str]:
    """Targets of the links and images of a page outside code and comments."""
    text = _CODE.sub("", _COMMENT.sub("", text))
    return [target for _, _, target in _LINK.findall(text)] + re.findall(
        r'(?:src|href)="([^"]+)"', text
    )


def target_of(path: str, link: str) -> str | None:
    """The path that a relative link of a page names; None for an address or an anchor."""
    file = link.partition("#")[0]
    if not file or re.match(r"[a-z]+:|/", link):
        return None
    resolved = ((ROOT / path).parent / file).resolve()
    return resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else link


def without_links_outside(path: str, text: str, files: set[str]) -> str:
    """Replaces links to files and folders that are not part of the site with their text."""

    def replaced(link: re.Match[str]) -> str:
        target = target_of(path, link[3])
        is_outside = target is not None and target not in files and (ROOT / target).exists()
        return link[2] if is_outside else link[0]

    return _LINK.sub(replaced, text)


def assets(paths: list[str]) -> list[str]:
    """Files other than pages that the pages link, and all of those in `docs/`."""
    linked = {
        target
        for path in paths
        for link in links((ROOT / path).read_text(encoding="utf-8"))
        if (target := target_of(path, link)) and (ROOT / target).is_file()
    }
    inside = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file()}
    return sorted(path for path in linked | inside if not path.endswith((".md", ".py", ".pyc")))


def llms_text(name: str, entries: list[Entry]) -> str:
    """The index `llms.txt`: one line a page, with its title and summary."""
    home, lines, last = read(HOME), list[str](), ""
    for section, path in listed(expanded(entries)):
        if path == HOME:
            continue
        if section != last:
            lines += ["", f"## {section}", ""]
            last = section
        page = read(path)
        lines.append(f"- [{page.title}]({path})" + f": {page.summary}" * bool(page.summary))
    return "\n".join([f"# {name}", "", f"> {home.summary}", *lines, ""])
