"""The live page in a real Chromium: what a person sees of a server, on which screen, and by the keyboard."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, chromium
from config_file import model, tensor, write_config
from operated import Client
from serving import GPUSERVE, Addresses, serving

pytestmark = pytest.mark.thorough
HOSTILE = "<img src=x onerror=alert(1)>"
N_MODELS = 200
PHONE = (375, 800)
VIEWS = ("#/", "#/models/echo/1", "#/models/a-pipeline-with-a-long-name-007/1", "#/events", "#/config")
TEXTS = (
    "#about",
    "#state",
    "nav a",
    "figcaption .key",
    "thead th",
    "tbody td",
    "button.send",
    "h3",
    "legend",
)


def entries() -> list[dict[str, Any]]:
    """Two models with workers, and ensembles of them up to so many in all."""
    x, y = tensor("x", "FP32", -1), tensor("y", "FP32", -1)
    made = [model("echo", "echo", [x], [y], 8, instances=[{"device": "cpu", "count": 2}])]
    made.append(model("optional", "optional", [tensor("a", "FP32", 1), tensor("b", "FP32", 1, optional=True)],
                      [tensor("sum", "FP32", 1), tensor("given", "BYTES", 1)], 8))  # fmt: skip
    steps = [{"model": "echo", "inputs": {"x": "x"}, "outputs": {"y": "y"}}]
    for number in range(N_MODELS - len(made)):
        one = {"name": f"a-pipeline-with-a-long-name-{number:03d}", "inputs": [x], "outputs": [y]}
        made.append({**one, "max_batch_size": 8, "ensemble": {"steps": steps}})
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    with serving(
        GPUSERVE, "serve", str(write_config(tmp_path_factory.mktemp("page"), entries()))
    ) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """A wide and light screen; whatever a test does, nothing is complained of."""
    started.emulate(1200, 1000)
    started.complaints()
    yield started
    assert started.complaints() == []


def is_wider_than_the_screen(browser: Browser) -> Any:
    return browser.run("return document.documentElement.scrollWidth > innerWidth")


def test_two_hundred_models_are_seen_filtered_and_sorted(server: Addresses, browser: Browser) -> None:
    browser.open(server.http)
    browser.wait(lambda: browser.count("#models tbody tr") == N_MODELS)
    assert browser.text("#state") == "ready"
    assert browser.text("#figures").split("models\n")[1].startswith("200/200")
    filter_field = browser.find("#filter")
    filter_field.send_keys("pipeline-with-a-long-name-01")
    assert browser.count("#models tbody tr") == 10
    filter_field.clear()
    filter_field.send_keys("none like this")
    assert "None of 200 models has" in browser.text("#no-models")
    browser.run(
        "const f = document.getElementById('filter'); f.value = ''; f.dispatchEvent(new Event('input'))"
    )
    first = browser.text("#models tbody tr a")
    browser.find("#models thead button").click()
    assert browser.find("#models thead th").get_attribute("aria-sort") == "descending"
    assert browser.text("#models tbody tr a") != first


def test_plots_and_figures_move_under_load(server: Addresses, browser: Browser) -> None:
    browser.open(server.http, "#/models/echo/1")
    line = "return document.querySelector('#model figure path.first').getAttribute('d')"
    browser.wait(lambda: browser.run(line))
    ends = threading.Event()

    def load() -> None:
        with Client(server.http) as client:
            while not ends.is_set():
                client.infer("echo", 1.0)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        browser.wait(lambda: "answered 0" not in browser.text("#model figcaption"))
        browser.wait(lambda: "p99 \u2013" not in browser.text("#model figure:nth-child(2) figcaption"))
        before = browser.run(line)
        browser.wait(lambda: browser.run(line) != before)
    finally:
        ends.set()
        thread.join()


def test_the_form_sends_a_request_and_says_what_is_wrong(server: Addresses, browser: Browser) -> None:
    browser.open(server.http, "#/models/echo/1")
    browser.wait(lambda: browser.count("form[aria-label] textarea") == 1)
    data = browser.find("form[aria-label] textarea")
    data.clear()
    data.send_keys("[1.5")
    browser.find("button.send").click()
    browser.wait(lambda: "x: the data is no JSON" in browser.text(".status"))
    data.send_keys("]")
    browser.find("button.send").click()
    browser.wait(lambda: "200 OK" in browser.text(".status"))
    answer = json.loads(browser.text("form[aria-label] pre"))
    assert answer["outputs"][0]["data"] == [1.5]
    data.clear()
    data.send_keys(json.dumps([HOSTILE]))
    browser.find("button.send").click()
    browser.wait(lambda: "400 Bad Request" in browser.text(".status"))
    assert browser.count("form[aria-label] img") == 0
    assert any("400 (Bad Request)" in one for one in browser.complaints())  # and no other


def test_an_optional_input_may_be_left_out(server: Addresses, browser: Browser) -> None:
    browser.open(server.http, "#/models/optional/1")
    browser.wait(lambda: browser.count("form[aria-label] textarea") == 2)
    browser.find("button.send").click()
    browser.wait(lambda: "200 OK" in browser.text(".status"))


def test_a_dead_instance_is_seen_and_what_had_happened(server: Addresses, browser: Browser) -> None:
    browser.open(server.http, "#/models/echo/1")
    browser.wait(lambda: browser.count("#model table[aria-label=Instances] tbody tr") == 2)
    pid = "#model table[aria-label=Instances] tbody tr:nth-child(2) td:nth-child(4)"
    before = browser.wait(lambda: browser.text(pid).strip())
    os.kill(int(before), signal.SIGKILL)
    restarts = "#model table[aria-label=Instances] tbody tr:nth-child(2) td:last-child"
    browser.wait(lambda: browser.text(restarts) == "1")
    browser.wait(lambda: browser.text(pid).strip() not in {before, "\u2013", ""})
    browser.find("nav a[href='#/events']").click()
    browser.wait(lambda: "instance died" in browser.text("#all-events"))
    assert "echo v1 cpu#1" in browser.text("#all-events")
    assert browser.count("#all-events .bad") >= 1


def test_the_settings_are_shown_and_filtered(server: Addresses, browser: Browser) -> None:
    browser.open(server.http, "#/config")
    browser.wait(lambda: browser.count("#config tbody tr") > 60)
    assert "not given" in browser.text("#config tbody")
    browser.find("#config input[type=checkbox]").click()
    changed = browser.text("#config tbody")
    assert "log_format" in changed
    assert "max_connections" not in changed


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dark", [False, True])
def test_every_view_fits_a_phone_in_either_light(
    server: Addresses, browser: Browser, view: str, dark: bool
) -> None:
    browser.emulate(*PHONE, dark=dark, mobile=True)
    browser.open(server.http, view)
    seen = {"#/": "#models tbody tr", "#/events": "#all-events li", "#/config": "#config tbody tr"}
    browser.wait(lambda: browser.count(seen.get(view, "form[aria-label] textarea")))
    assert not is_wider_than_the_screen(browser)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(22, 24, 27)" if dark else "rgb(251, 251, 250)")


def contrast(browser: Browser, selector: str) -> Any:
    """How much the text of an element stands out, as WCAG has it."""
    return browser.run(
        """
        const shown = (color) => color.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((one) => one / 255)
          .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
          .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
        let node = document.querySelector(arguments[0]);
        const text = light(shown(getComputedStyle(node).color));
        const clear = (one) => (shown(getComputedStyle(one).backgroundColor)[3] ?? 1) === 0;
        while (node && clear(node)) node = node.parentElement;
        const ground = light(shown(getComputedStyle(node ?? document.body).backgroundColor));
        return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
        """,
        selector,
    )


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_and_everything_can_be_reached_and_has_a_name(
    server: Addresses, browser: Browser, dark: bool
) -> None:
    browser.emulate(1200, 1000, dark=dark)
    browser.open(server.http, "#/models/echo/1")
    browser.wait(lambda: browser.count("button.send"))
    for selector in TEXTS:
        assert contrast(browser, selector) >= 4.5, selector
    nameless = browser.run(
        """
        return [...document.querySelectorAll('input, textarea, button, a, table, svg[role=img], meter, pre')]
          .filter((one) => one.checkVisibility() && !(one.getAttribute('aria-label') || one.ariaLabel
            || one.labels?.length || one.getAttribute('aria-labelledby') || one.textContent.trim()))
          .map((one) => one.outerHTML.slice(0, 80))
        """
    )
    assert nameless == []
    assert browser.run("return document.documentElement.lang") == "en"


def test_the_keyboard_is_enough(server: Addresses, browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(server.http)
    browser.wait(lambda: browser.count("#models tbody a"))
    focused = "const one = document.activeElement; return one.className || one.id || one.textContent.trim()"
    reached = []
    for _ in range(7):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.run(focused))
    assert reached[:5] == ["skip", "token", "Overview", "Events", "Config"]
    browser.find("nav a[href='#/events']").send_keys(Keys.ENTER)
    browser.wait(lambda: browser.run("return location.hash") == "#/events")
    assert browser.run("return document.activeElement.id") == "main"
    browser.find("nav a[href='#/']").send_keys(Keys.ENTER)
    browser.find("#models tbody a").send_keys(Keys.ENTER)
    browser.wait(lambda: browser.count("#model h2"))


def test_a_server_that_goes_and_comes_is_told(tmp_path: Any, browser: Browser) -> None:
    few = [one for one in entries() if one["name"] == "echo"]
    config = write_config(tmp_path, few)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        browser.open(addresses.http)
        browser.wait(lambda: browser.text("#state") == "ready")
    browser.wait(lambda: "Trying again" in browser.text("#notice"))
    assert browser.text("#state") == "no connection"
    assert all("ERR_" in one for one in browser.complaints())


def test_pages_that_were_left_hold_no_connection(server: Addresses, browser: Browser) -> None:
    """A browser makes six to one server: the seventh page would wait."""
    for _ in range(8):
        browser.driver.get(f"http://{server.http}/")
        browser.wait(lambda: browser.text("#state") == "ready")
        browser.driver.get(f"http://{server.http}/docs")
    browser.driver.back()
    browser.wait(lambda: browser.text("#state") == "ready")
