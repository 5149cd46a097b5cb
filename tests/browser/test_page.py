"""The page in a real browser: what is asked for appears, step by step, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.adapters import save_adapter
from samovar.engine.models import find_model, load_pipeline
from server.running import RunningServer, running

pytestmark = pytest.mark.browser
BROWSER = "/usr/bin/chromium"
PATIENCE_MS = 600_000
PROMPT = "a grinning cat, 3d style"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    pipe = load_pipeline(find_model("emoji"), torch.float32)  # type: ignore[arg-type]
    adapter = save_adapter(pipe, tmp_path_factory.mktemp("adapters"), ["to_q", "to_v"])
    with running("emoji", "--cache-backend", "tea_cache", f"--lora=ink={adapter}") as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    if not Path(BROWSER).exists():
        pytest.fail(f"{BROWSER} is not there: apt-get install chromium")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


class Visit:
    """A page that was opened, what it asked for and what it complained about."""

    def __init__(self, browser: Any, server: RunningServer, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{server.address}/")
        self.page.wait_for_selector("#state[data-state=ready]")

    def ask(self, prompt: str = PROMPT, steps: int = 6, seed: int | None = 7, compare: bool = False) -> None:
        self.page.fill("#prompt", prompt)
        self.page.fill("#steps", str(steps))
        self.page.fill("#seed", "" if seed is None else str(seed))
        self.page.set_checked("#compare", compare)
        self.page.keyboard.press("Control+Enter")

    def wait_done(self) -> None:
        self.page.wait_for_selector("#stop[hidden]", state="attached")

    def shot(self, name: str) -> None:
        """Kept where somebody wants to look at it: `SHOTS=folder make test-browser`."""
        if "SHOTS" in os.environ:
            self.page.screenshot(path=Path(os.environ["SHOTS"]) / f"{name}.png", full_page=True)


@pytest.fixture
def visit(browser: Any, server: RunningServer) -> Iterator[Visit]:
    visited = Visit(browser, server, viewport={"width": 1280, "height": 900})
    yield visited
    visited.context.close()


def test_a_image_appears_while_it_is_made(visit: Visit, server: RunningServer) -> None:
    visit.ask(steps=12)
    visit.page.wait_for_selector("#first:not([hidden])")  # A preview.
    visit.page.wait_for_selector(".cell.computed")
    visit.wait_done()
    assert visit.page.locator(".timeline").count() == 1
    assert visit.page.locator(".cells .cell").count() == 12
    assert visit.page.locator(".cells .computed").count() + visit.page.locator(".cells .skipped").count() == 12
    assert visit.page.locator(".cells .skipped").count() > 0
    assert visit.page.get_attribute("#first", "alt") == PROMPT
    figures = visit.page.inner_text("#figures")
    assert all(word in figures for word in ("time", "skipped", "memory", "seed"))
    assert visit.page.locator("#history button").count() == 1
    assert visit.complaints == []
    assert {url.split("/")[2] for url in visit.asked if not url.startswith("data:")} == {server.address.split("/")[2]}


def test_cached_and_exact_stand_side_by_side(visit: Visit) -> None:
    visit.ask(steps=12, compare=True)
    visit.page.wait_for_selector("#second:not([hidden])")
    visit.wait_done()
    assert visit.page.locator(".timeline").count() == 2
    assert visit.page.locator(".timeline").nth(1).locator(".computed").count() == 12
    assert re.search(r"likeness\s+(\d+\.\d dB|same bits)", visit.page.inner_text("#figures"))
    visit.page.focus("#split")
    for _ in range(10):
        visit.page.keyboard.press("ArrowRight")
    assert visit.page.input_value("#split") == "60"
    split = visit.page.eval_on_selector("#canvas", "element => getComputedStyle(element).getPropertyValue('--split')")
    assert split == "60%"
    visit.shot("desktop")
    assert visit.complaints == []


def test_a_run_can_be_cancelled(visit: Visit, server: RunningServer) -> None:
    visit.ask(steps=200)
    visit.page.wait_for_selector(".cell.computed")
    visit.page.keyboard.press("Escape")
    visit.wait_done()
    assert visit.page.is_hidden("#problem")
    visit.ask(steps=3)
    visit.wait_done()
    assert visit.page.locator("#history button").count() == 1
    assert server.status()["running"] == 0


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_image_outlives_its_exact_half(visit: Visit, how: str) -> None:
    if how == "failed":
        visit.page.route(
            "**/v1/images/generations",
            lambda route: route.abort() if '"cache":false' in route.request.post_data else route.continue_(),
        )
    visit.ask(steps=3 if how == "failed" else 12, compare=True)
    if how == "cancelled":
        visit.page.wait_for_selector(".timeline:nth-child(2) .cell.computed")
        visit.page.keyboard.press("Escape")
    visit.wait_done()
    visit.page.wait_for_selector("#history button")
    kept = visit.page.get_attribute("#history img", "src")
    assert visit.page.get_attribute("#first", "src") == kept
    assert visit.page.is_hidden("#second")
    assert visit.page.is_visible("#problem") == (how == "failed")
    visit.page.click("#history button")
    assert visit.page.locator(".timeline").count() == 1


def test_errors_are_shown_in_words_and_leave_what_is_there(visit: Visit) -> None:
    visit.ask(steps=3)
    visit.wait_done()
    shown, figures = visit.page.get_attribute("#first", "src"), visit.page.inner_text("#figures")
    visit.page.fill("#width", "130")
    visit.ask()
    visit.page.wait_for_selector("#problem:not([hidden])")
    assert "width must be a multiple of 8" in visit.page.inner_text("#problem")
    visit.wait_done()
    assert visit.page.is_visible("#first")
    assert (visit.page.get_attribute("#first", "src"), visit.page.inner_text("#figures")) == (shown, figures)
    assert visit.page.locator(".cells .cell").count() == 3


def test_history_outlives_a_reload_and_brings_a_image_back(visit: Visit) -> None:
    visit.ask("rocket, flat style", steps=3, seed=5)
    visit.wait_done()
    visit.page.reload()
    visit.page.wait_for_selector("#state[data-state=ready]")
    visit.page.click("#history button")
    assert visit.page.input_value("#prompt") == "rocket, flat style"
    assert visit.page.input_value("#seed") == "5"
    assert visit.page.is_visible("#first")
    assert visit.page.locator(".cells .cell").count() == 3
    visit.page.click("#forget")
    visit.page.wait_for_selector("#history button", state="detached")
    assert visit.page.locator("#history button").count() == 0


def test_the_request_can_be_copied_and_works(visit: Visit, tmp_path: Path) -> None:
    import subprocess
    import sys

    visit.page.click("#tab-python")
    visit.page.fill("#prompt", "true")
    assert 'prompt="true"' in visit.page.inner_text("#snippet")
    visit.page.click("#tab-curl")
    visit.page.fill("#prompt", 'it\'s a "cat", 3d style')
    visit.page.fill("#steps", "2")
    curl = visit.page.inner_text("#snippet")
    visit.page.focus("#tab-curl")
    visit.page.keyboard.press("ArrowRight")
    python = visit.page.inner_text("#snippet")
    assert visit.page.get_attribute("#tab-python", "aria-selected") == "true"
    (tmp_path / "a").mkdir()
    subprocess.run(curl, shell=True, check=True, cwd=tmp_path / "a", timeout=180)
    subprocess.run([sys.executable, "-c", python], check=True, cwd=tmp_path, timeout=180)
    for file in (tmp_path / "a" / "out.png", tmp_path / "out.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(browser: Any, server: RunningServer, scheme: str) -> None:
    size = {"width": 390, "height": 844}
    visit = Visit(browser, server, viewport=size, color_scheme=scheme, has_touch=True, is_mobile=True)
    visit.ask(steps=6)
    visit.wait_done()
    assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= 390
    ground = visit.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    lightness = sum(int(value) for value in re.findall(r"\d+", ground)[:3]) / 3
    assert lightness < 64 if scheme == "dark" else lightness > 192
    for name in ("prompt", "go", "canvas"):
        box = visit.page.locator(f"#{name}").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    visit.shot(f"phone-{scheme}")
    visit.context.close()


def test_a_server_with_a_key_asks_for_it(browser: Any) -> None:
    with running("emoji", environment={"SAMOVAR_API_KEY": "open-sesame"}) as guarded:
        context = browser.new_context()
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{guarded.address}/")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", "schl\u00fcssel")
        page.keyboard.press("Enter")
        page.wait_for_selector("#problem:not([hidden])")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", " open-sesame ")
        page.keyboard.press("Enter")
        page.wait_for_selector("#state[data-state=ready]")
        assert "$SAMOVAR_API_KEY" in page.inner_text("#snippet")
        assert "open-sesame" not in page.content()
        context.close()
    assert "open-sesame" not in guarded.text
