"""`docs/server_flags.md` equals its generator."""

from dataclasses import fields
from pathlib import Path

from shared.options import flags_doc
from shared.options.flags import spelling
from shared.options.options import PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server_flags.md"


def test_flags_page_equals_generator() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == flags_doc.to_markdown(), (
        "run python -m shared.options.flags_doc > docs/server_flags.md"
    )


def test_flags_page_lists_flags_with_settable_defaults() -> None:
    lines = flags_doc.to_markdown().splitlines()
    for part in PARTS.values():
        for item in fields(part):
            (line,) = [each for each in lines if each.startswith(f"| `{spelling(item.name)}`")]
            _, _, default, meaning, _ = line.split("|")
            assert meaning.strip()
            if item.default is None or item.default is False:
                assert default.strip() not in ("None", "False")
            elif "(default" not in item.metadata["help"]:
                assert default.strip() == str(item.default)
