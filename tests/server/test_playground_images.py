"""Images in the playground: files, drops, the clipboard, and their token positions."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.browser import Page, chromium
from tests.support.http_fixtures import IMAGES, Server, save_tokenizer, serving
from tests.support.images import rgb, stored

SIDE = IMAGES.multiple
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '(<|image|>)' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
GIVE = """
const [kind, name, base64] = arguments;
const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
const transfer = new DataTransfer();
transfer.items.add(new File([bytes], name, { type: "image/png" }));
const given = { bubbles: true, cancelable: true };
document.querySelector("#question").dispatchEvent(
  kind === "paste"
    ? new ClipboardEvent("paste", { ...given, clipboardData: transfer })
    : new DragEvent(kind, { ...given, dataTransfer: transfer }),
);
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(page, tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(["-m", "tests.support.http_fixtures", str(folder), "--sees"]) as running:
        yield running


def png(rows: int, columns: int) -> bytes:
    return stored(rgb(np.full((rows * SIDE, columns * SIDE, 3), 40, np.uint8)))


def give(page: Page, kind: str, name: str, data: bytes) -> None:
    before = len(page.all("#images .image"))
    page.driver.execute_script(GIVE, kind, name, base64.b64encode(data).decode())
    page.until(lambda: len(page.all("#images .image")) > before)


def test_playground_accepts_images_by_file_drop_paste(page, server, tmp_path):
    page.open(server.url)
    page.set_max_tokens(7)
    assert page.one("#add-image").is_displayed()
    file: Path = tmp_path / "file.png"
    file.write_bytes(png(2, 3))
    page.one("#files").send_keys(str(file))
    page.until(lambda: page.all("#images .image"))
    give(page, "drop", "dropped.png", png(1, 1))
    give(page, "paste", "pasted.png", png(1, 2))
    assert page.one("#status").get_attribute("textContent").startswith("Added pasted.png, 16 × 8")
    page.one("#images [aria-label='Remove dropped.png']").click()
    page.ask("what is it?")
    assert not page.one("#images").is_displayed()
    likenesses = page.all(".turn.user .image canvas")
    assert [each.get_attribute("aria-label") for each in likenesses] == [
        "file.png, 24 × 16 pixels",
        "pasted.png, 16 × 8 pixels",
    ]
    page.until(lambda: page.one(".turn.user figcaption").text)
    notes = [note.text for note in page.all(".turn.user figcaption")]
    assert notes == ["6 tokens from position 1", "2 tokens from position 9"]
    assert "what is it?" in page.one(".turn.user").text
    assert page.complaints() == []


def test_playground_image_errors_keep_question_and_images(page, server):
    page.open(server.url)
    page.set_max_tokens(7)
    page.driver.execute_script(GIVE, "drop", "not.png", "bm8=")
    page.until(lambda: page.one("#alert").text)
    assert page.one("#alert").text == "not.png cannot be decoded by this browser"
    give(page, "drop", "kept.png", png(1, 1))
    page.one("#question").send_keys("<|image|>", "\n")
    page.until(lambda: page.one("#alert").text)
    assert "the placeholder of images; remove it" in page.one("#alert").text
    assert len(page.all("#images .image")) == 1
    assert not page.all(".turn")
    page.complaints()


def test_playground_rejects_images_for_text_models(page, tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as blind:
        page.open(blind.url)
        assert not page.one("#add-image").is_displayed()
        page.driver.execute_script(GIVE, "drop", "a.png", "bm8=")
        page.until(lambda: page.one("#alert").text)
        assert "does not support image input" in page.one("#alert").text
