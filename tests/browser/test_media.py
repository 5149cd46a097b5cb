"""The page of a server of videos, of sound, and of one that edits: what is made is played, what is given is sent."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.builder import build
from pipelines.recipes import RECIPES
from server.conftest import DEFAULTS, VIDEO_DEFAULTS
from server.running import RunningServer, running

from .test_page import Visit, browser  # noqa: F401

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]

KEEP_MASK = """() => {
  const append = FormData.prototype.append;
  FormData.prototype.append = function (name, value) {
    if (name === "mask") window.sentMask = value;
    return append.apply(this, arguments);
  };
}"""
"""The browser does not tell what is in a form with files."""


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models") / "films"
    PIPELINES["wan"].build(0).save_pretrained(folder)
    (folder / "samovar.json").write_text(json.dumps(VIDEO_DEFAULTS))
    with running(folder, "--jobs", str(tmp_path_factory.mktemp("jobs")), "--max-steps", "5000") as started:
        yield started


@pytest.fixture
def visit(browser: Any, films: RunningServer) -> Iterator[Visit]:  # noqa: F811
    visited = Visit(browser, films, viewport={"width": 1280, "height": 900})
    yield visited
    visited.context.close()


def ask(visit: Visit, prompt: str = "a cat", steps: int = 2, **fields: str) -> None:
    visit.page.fill("#prompt", prompt)
    visit.page.fill("#steps", str(steps))
    for name, value in fields.items():
        visit.page.fill(f"#{name}", value)
    visit.page.keyboard.press("Control+Enter")


def test_a_video_is_made_played_and_kept_by_the_server(visit: Visit) -> None:
    assert visit.page.is_hidden("#compare-row")
    assert visit.page.is_hidden("#upload")
    ask(visit, seconds="1", seed="7")
    visit.page.wait_for_selector("#film:not([hidden])")
    visit.wait_done()
    visit.page.wait_for_function("() => document.getElementById('film').readyState >= 2")
    size = visit.page.eval_on_selector("#film", "film => [film.videoWidth, film.videoHeight, film.duration]")
    assert size == [48, 32, pytest.approx(17 / 16, abs=0.05)]
    assert "17 at 16/s" in visit.page.inner_text("#figures")
    visit.shot("video")
    visit.page.reload()
    visit.page.click("#history button")
    visit.page.wait_for_selector("#film:not([hidden])")
    assert visit.page.input_value("#prompt") == "a cat"
    assert (visit.page.input_value("#seed"), visit.page.input_value("#seconds")) == ("7", "1")
    visit.page.click("#delete")
    visit.page.wait_for_selector("#history button", state="detached")
    assert visit.page.is_hidden("#film")
    assert visit.complaints == []


def test_a_long_video_shows_previews_and_can_be_cancelled(visit: Visit, films: RunningServer) -> None:
    ask(visit, steps=4000)
    visit.page.wait_for_function("() => / %$/.test(document.getElementById('go').textContent)")
    visit.page.wait_for_selector("#first:not([hidden])")
    visit.page.keyboard.press("Escape")
    visit.wait_done()
    assert visit.page.is_hidden("#problem")
    visit.page.wait_for_selector("#history button", state="detached")
    with films.client() as http:
        assert http.get("/v1/videos").json()["data"] == []


def test_a_refused_video_leaves_the_last_one(visit: Visit) -> None:
    ask(visit)
    visit.page.wait_for_selector("#film:not([hidden])")
    visit.wait_done()
    shown = visit.page.get_attribute("#film", "src")
    ask(visit, width="50", height="32")
    visit.page.wait_for_selector("#problem:not([hidden])")
    assert "width must be a multiple of 16" in visit.page.inner_text("#problem")
    assert visit.page.get_attribute("#film", "src") == shown
    assert visit.page.is_visible("#film")


def test_sound_is_played_and_kept(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    import diffusers

    build(diffusers.StableAudioPipeline, RECIPES["StableAudioPipeline"]).save_pretrained(tmp_path)
    with running(tmp_path) as server:
        visit = Visit(browser, server)
        assert visit.page.is_hidden("#width")
        ask(visit, "rain", seconds="2")
        visit.page.wait_for_selector("#sound:not([hidden])")
        visit.wait_done()
        assert visit.page.inner_text("#history button") == "rain"
        visit.page.reload()
        visit.page.click("#history button")
        visit.page.wait_for_selector("#sound:not([hidden])")
        assert visit.page.get_attribute("#sound", "src")
        assert "audio_length" in visit.page.inner_text("#snippet")
        assert visit.complaints == []
        visit.context.close()


def test_an_image_and_its_mask_are_sent(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    from diffusers import FluxInpaintPipeline

    FluxInpaintPipeline(**tiny_flux_pipeline().components).save_pretrained(tmp_path)
    (tmp_path / "samovar.json").write_text(json.dumps(DEFAULTS))
    files = {}
    for name, colour in (("image", "teal"), ("mask", "white")):
        content = io.BytesIO()
        PIL.Image.new("RGB", (24, 16), colour).save(content, "PNG")
        files[name] = {"name": f"{name}.png", "mimeType": "image/png", "buffer": content.getvalue()}
    with running(tmp_path) as server:
        visit = Visit(browser, server)
        for name, file in files.items():
            visit.page.set_input_files(f"#{name}", file)
        assert visit.page.locator("#given img").count() == 2
        visit.ask("a door", steps=3)
        visit.page.wait_for_selector("#first:not([hidden])")
        visit.wait_done()
        assert visit.page.is_hidden("#problem"), visit.page.inner_text("#problem")
        assert visit.page.locator("#history button").count() == 1
        redrawn = visit.page.get_attribute("#first", "src")
        visit.page.set_input_files("#mask", [])
        visit.page.wait_for_selector("#paint:not([hidden])")
        box = visit.page.locator("#paint").bounding_box()
        assert box is not None
        visit.page.mouse.move(box["x"] + 2, box["y"] + box["height"] / 2)
        visit.page.mouse.down()
        visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
        visit.page.mouse.up()
        assert all(part in visit.page.inner_text("#snippet") for part in ("/v1/images/edits", "image=@", "mask=@"))
        visit.page.evaluate(KEEP_MASK)
        visit.ask("a door", steps=3)
        visit.page.wait_for_selector("#history li:nth-child(2)")
        mask = visit.page.evaluate("async () => [...new Uint8Array(await window.sentMask.arrayBuffer())]")
        assert painted_part(bytes(mask)) == [True, False]
        assert visit.page.get_attribute("#first", "src") != redrawn
        assert visit.complaints == []
        visit.shot("edit")
        visit.context.close()


def painted_part(content: bytes) -> list[bool]:
    """Whether a mask is white left and right of the middle."""
    mask = PIL.Image.open(io.BytesIO(content)).convert("L")
    assert mask.size == (24, 16)
    return [mask.getpixel((x, 8)) > 200 for x in (4, 20)]
