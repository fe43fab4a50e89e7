"""The playground in a headless Chromium: questions, token origins, draft trees, settings."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.browser import Page, chromium
from tests.support.http_fixtures import POOL_TOKENS, Server, save_tokenizer, serving

KEY = "schlüssel"
EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
QUESTION = "A cinema has 6 rows of 13 seats. How many seats are there?"
RAMBLING = "Tell me a long story about a lighthouse and the sea."


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("model")
    save_tokenizer(made)
    return str(made)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def server(page, folder) -> Iterator[Server]:
    with serving(["-m", "tests.support.http_fixtures", folder]) as running:
        yield running


@pytest.fixture
def answered(page, server) -> Page:
    """Returns the page with a short answer."""
    page.open(server.url)
    page.driver.execute_script("localStorage.clear()")
    page.set_max_tokens(31)
    page.ask("tokens and steps")
    return page


def test_playground_colors_tokens_by_origin(answered, tmp_path):
    page = answered
    tokens = page.all(".token")
    assert [token.get_attribute("data-origin") for token in tokens[:4]] == [
        "target",
        "draft",
        "draft",
        "bonus",
    ]
    colours = [page.style(token, "backgroundColor") for token in tokens[:4]]
    assert len(set(colours)) == 3, colours
    assert colours[0] == colours[3], "the target's own tokens have no shade"
    assert page.style(tokens[3], "boxShadow") != page.style(tokens[0], "boxShadow")
    words = page.driver.execute_script(
        "const text = arguments[0].cloneNode(true);"
        "text.querySelectorAll('.mark, .ghost').forEach((part) => part.remove());"
        "return text.textContent",
        page.one(".turn.assistant .text"),
    )
    assert "okens and steps" in words
    image = tmp_path / "playground.png"
    assert page.driver.save_screenshot(str(image))
    assert image.stat().st_size > 10_000
    assert page.complaints() == []


def test_playground_token_shows_step_and_draft_tree(answered):
    page = answered
    page.all(".token")[2].click()
    assert page.one("#step-title").text == "Step 1: 2 of 4 drafts accepted"
    kinds = [node.get_attribute("class") for node in page.all("#tree g")]
    assert kinds == ["root", "taken draft d1", "taken draft d2", "rejected", "rejected", "own"]
    assert len(page.all("#tree path.taken")) == 3
    assert len(page.all(".token.same-step")) == 3
    assert "on the device" in page.one("#step-summary").text


def test_playground_figures_equal_server_values(answered, server):
    page = answered
    assert page.one("#m-length").text == "3.00"
    assert page.one("#m-step").text == "1.5 ms"
    assert float(page.one("#m-speed").text) > 0
    assert len(page.all("#strip g")) == 10
    assert "31 tokens in 10 steps" in page.one(".note").text


def test_playground_arrow_keys_move_between_tokens(answered):
    page = answered
    first = page.all(".token")[0]
    page.driver.execute_script("arguments[0].focus()", first)
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_RIGHT * 4)
    assert page.driver.switch_to.active_element == page.all(".token")[4]
    assert page.one("#step-title").text.startswith("Step 2")
    assert len(page.all(".token[tabindex='0']")) == 1


def test_playground_shows_rejected_drafts_on_request(answered):
    page = answered
    assert page.all(".ghost")
    assert not page.all(".ghost")[0].is_displayed()
    page.one("#ghosts").click()
    ghost = page.all(".ghost")[0]
    assert ghost.is_displayed()
    assert ghost.text == "-"
    assert "line-through" in page.style(ghost, "textDecorationLine")


def test_playground_setting_disables_drafts(answered):
    page = answered
    page.one("#new-chat").click()
    assert page.one("#welcome").is_displayed()
    assert not page.all(".turn")
    page.one("#open-settings").click()
    page.one("input[name=drafts][value=off]").click()
    page.one("#settings .primary").click()
    page.ask("plain")
    origins = {token.get_attribute("data-origin") for token in page.all(".token")}
    assert origins == {"target"}
    assert page.one("#m-length").text == "1.00"


def test_playground_text_mode_continues_text(answered):
    """For models without a chat template; the prompt then has no roles."""
    page = answered
    page.one("#open-settings").click()
    page.one("input[name=form][value=text]").click()
    page.one("#settings .primary").click()
    page.ask("xyz")
    words = [token.text for token in page.all(".turn.assistant:last-of-type .token")]
    assert words[1:7] == list("yzxyzx")


def test_playground_switches_theme_and_fits_phone(answered):
    page = answered
    body = page.one("body")
    before = page.style(body, "backgroundColor")
    page.one("#theme").click()
    assert page.style(body, "backgroundColor") != before
    try:
        page.resize(380, 760, is_phone=True)
        width = page.driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 380
        assert not page.one("#step").is_displayed()
        page.all(".token")[2].click()
        assert page.one("#step").is_displayed()
        page.one("#close-step").click()
        assert not page.one("#step").is_displayed()
    finally:
        page.resize(1280, 800)


def test_playground_error_keeps_question(page, server):
    page.open(server.url)
    page.set_max_tokens(POOL_TOKENS + 1)
    page.one("#question").send_keys("hello", "\n")
    page.until(lambda: page.one("#alert").text)
    assert "max_tokens" in page.one("#alert").text
    assert page.one("#question").get_attribute("value") == "hello"
    assert not page.all(".turn")
    page.complaints()


def test_playground_wrong_api_key_shows_key_form(page, folder):
    command = ["-m", "tests.support.http_fixtures", folder, "--api-key", KEY]
    with serving(command) as server:
        host = server.url.removeprefix("http://")
        page.open(f"http://me:{quote(KEY)}@{host}/")
        assert page.one("#model").text.startswith("repeater")
        assert not page.one("#key-form").is_displayed()
        page.driver.execute_script("sessionStorage.setItem('tandem-api-key', 'wrong')")
        page.open(server.url)
        assert page.one("#key-form").is_displayed()
        page.one("#key").send_keys(KEY, "\n")
        page.until(lambda: not page.one("#key-form").is_displayed())
        page.set_max_tokens(7)
        page.ask("hello")
        assert len(page.all(".token")) == 7
        assert KEY not in page.driver.page_source
    page.complaints()


@pytest.mark.matrix
def test_playground_demo_model_answers_and_stops(page, tmp_path):
    shape = ["--speculative-num-steps", "5", "--speculative-eagle-topk", "4"]
    shape += ["--speculative-num-draft-tokens", "12"]
    command = ["-m", "torch_impl.serve", "--port", "0", *EAGLE3, "models/demo/eagle3", *shape]
    with serving(command) as server:
        page.open(server.url)
        page.ask(QUESTION)
        assert "78" in page.one(".turn.assistant .text").text
        assert {"1", "5"} <= {token.get_attribute("data-depth") for token in page.all(".token")}
        assert len(page.all("#tree g")) > 6
        page.one("#question").send_keys(RAMBLING, "\n")
        page.until(lambda: len(page.all(".turn.assistant:last-of-type .token")) > 8)
        page.one("#stop").click()
        page.until(lambda: page.one("#send").is_displayed())
        server.wait_for_metric("tandem:num_requests_running", 0)
        assert page.complaints() == []
