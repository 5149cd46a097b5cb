"""The documentation site in a real browser: every page at two widths, with nothing fetched from elsewhere."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
BROWSER = "/usr/bin/chromium"
ROOT = Path(__file__).parents[2]
PHONE, DESKTOP = 390, 1280


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The built site, and its address."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_every_page_is_whole(site: tuple[Path, str], width: int) -> None:
    from playwright.sync_api import sync_playwright

    if not Path(BROWSER).exists():
        pytest.fail(f"{BROWSER} is not there: apt-get install chromium")
    folder, address = site
    problems: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 850})
        page.on("request", lambda request: request.url.startswith((address, "data:")) or problems.append(request.url))
        page.on("response", lambda answer: answer.status < 400 or problems.append(f"{answer.status} {answer.url}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        for file in sorted(folder.rglob("*.html")):
            name = file.relative_to(folder).as_posix()
            page.goto(address + name)
            page.wait_for_load_state("networkidle")
            if page.evaluate("document.documentElement.scrollWidth") > width:
                problems.append(f"{name} is wider than {width} pixels")
            problems += page.evaluate("[...document.images].filter(i => !i.naturalWidth).map(i => i.src)")
        browser.close()
    assert problems == []
