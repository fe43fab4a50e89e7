"""A Chromium without a window, for the tests of the page; Debian's packages have one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.support.counting import NO_BROWSER

WAIT_S = 20
CONSOLE = "goog:loggingPrefs"


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 800) -> Iterator[Page]:
    """A browser of its own; skips the test where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip(NO_BROWSER)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    for flag in flags:
        options.add_argument(flag)
    options.set_capability(CONSOLE, {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        page = Page(made)
        page.resize(width, height)
        yield page
    finally:
        made.quit()


class Page:
    """The playground in a browser."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        """Sets the size of the page, independent of the window's."""
        size = {"width": width, "height": height, "mobile": is_phone}
        command = "Emulation.setDeviceMetricsOverride"
        self.driver.execute_cdp_cmd(command, {**size, "deviceScaleFactor": 1 + is_phone})

    def open(self, url: str) -> None:
        """Opens the page and waits until it knows the model."""
        self.driver.get(url)
        self.until(lambda: self.one("#model").text or self.one("#alert").text)

    def ask(self, question: str) -> None:
        """Sends a question, and waits for the whole answer."""
        before = len(self.all(".turn.assistant"))
        self.one("#question").send_keys(question, "\n")
        self.until(lambda: len(self.all(".turn.assistant")) > before)
        self.until(lambda: self.one("#send").is_displayed())
        assert not self.one("#alert").text

    def set_max_tokens(self, number: int) -> None:
        """Sets the maximum number of tokens of later answers."""
        self.one("#open-settings").click()
        self.one("#max-tokens").clear()
        self.one("#max-tokens").send_keys(str(number))
        self.one("#settings .primary").click()

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, holds) -> None:
        """Waits until a condition holds."""
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: holds())

    def style(self, element: WebElement, name: str) -> str:
        """Returns a computed style of an element."""
        script = "return getComputedStyle(arguments[0])[arguments[1]]"
        return self.driver.execute_script(script, element, name)

    def complaints(self) -> list[str]:
        """Returns the browser's log messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
