"""A real Chromium without a screen, for tests of pages. Where there is none, they are skipped and say so."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_DRIVER = shutil.which("chromedriver")
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1000")
WAIT_S = 20.0


class Browser:
    """A page, and what a test asks of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, view: str = "#/") -> None:
        self.driver.get("about:blank")  # a view of the same page would not be loaded again
        self.driver.get(f"http://{address}/{view}")
        self.wait(lambda: self.text("#state") not in {"", "connecting"})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What is to be read in the first that the selector finds, "" where it finds none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def wait(self, so: Callable[[], Any]) -> Any:
        """Look again and again until it is so; what it is then."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, WAIT_S, 0.1).until(lambda _: so())

    def complaints(self) -> list[str]:
        """What the browser has said of errors and of what the policy refused, since it was asked last."""
        found = self.driver.get_log("browser")
        return [one["message"] for one in found if one["level"] in {"SEVERE", "WARNING"}]

    def emulate(self, width: int, height: int, *, dark: bool = False, mobile: bool = False) -> None:
        """Let the page be seen on another screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser whose files are in ``profile``."""
    why = "selenium is not installed (pip install selenium)"
    webdriver = pytest.importorskip("selenium.webdriver", reason=why)
    if _CHROMIUM is None or _DRIVER is None:
        pytest.skip("there is no Chromium with its driver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = _CHROMIUM
    for flag in _FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(_DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
