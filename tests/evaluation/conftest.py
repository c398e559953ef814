"""A headless browser for the viewer's tests, where the machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1440,960",
)


def find_program(*names: str) -> str | None:
    """Path of the first program that is installed."""
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A Chromium session driven by selenium; the test is skipped where one of the three is missing."""
    chromium = find_program("chromium", "chromium-browser", "google-chrome")
    chromedriver = find_program("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs a browser: install `chromium` and `chromium-driver`")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs a browser driver: `pip install selenium`")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=chromedriver))
    yield driver
    driver.quit()
