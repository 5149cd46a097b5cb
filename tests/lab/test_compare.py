"""Every setting stands beside the exact images and as many plain steps, on a sheet and on a page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.tiny import TASKS, MakeSession
from pipelines import PIPELINES
from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Method, Runner, Session, Task, cached
from samovar.lab.compare import Comparison, compare, contact_sheet, page, table
from samovar.lab.methods import EXACT
from samovar.lab.metrics import Quality
from samovar.lab.session import Row, save_images
from samovar.media import read_media

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
QUALITY = Quality(31.5, 0.97, 0.0123)
NAME = "</script><b>x"


def test_each_setting_is_followed_by_as_many_plain_steps_as_it_computes(
    make_session: MakeSession, tmp_path: Path
) -> None:
    session = make_session(steps=8, is_timed=True)
    # A baseline does not go by seconds: it once had 10 plain steps beside 6, as the machine slowed down in between.
    clock = iter(range(1, 1000))
    session.runner._now = lambda: float(next(clock) ** 2)  # type: ignore[method-assign]
    masks = ("##.#.#.#", "##......", "#......#", "########")
    found = compare(session, [cached("tea_cache", {"schedule": mask}, name="mine") for mask in masks], tmp_path)
    assert [(row.method.name, row.computed) for row in found.rows] == [
        ("exact", 8), ("mine", 5), ("plain 5 steps", 5), ("mine", 2), ("plain 2 steps", 2), ("mine", 2), ("mine", 8),
        ("plain 7 steps", 7),
    ], "one baseline for two settings that compute as much"  # fmt: skip
    for folder in (row.folder for row in found.rows):
        assert folder is not None
        assert sorted(file.name for file in folder.iterdir()) == ["0.png", "1.png", "2.png"]
    report = found.to_dict()
    assert [task["seed"] for task in report["tasks"]] == [0, 1, 2]
    assert len(report["rows"]) == len(found.rows)
    assert sum("all 3 images" in line for line in report["verdict"]) == 4


def test_a_setting_given_twice_is_refused(make_session: MakeSession, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="given twice"):
        compare(make_session(), [cached("tea_cache", {}), cached("tea_cache", {})], tmp_path)
    assert not any(tmp_path.glob("*/*.png")), "and nothing is made"


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two rows of two images of one colour each."""
    folders = [tmp_path / "exact", tmp_path / "setting-1"]
    rows = [
        Row(EXACT, 20, (Quality(100.0, 1.0, 0.0),) * 2, 20, seconds=2.0, speedup=1.0, folder=folders[0]),
        Row(Method(NAME, "samovar auto"), 10, (QUALITY,) * 2, 20, speedup=2.0, folder=folders[1]),
    ]
    for number, colour in enumerate(COLOURS):
        image = torch.tensor(colour).view(3, 1, 1).expand(3, 80, 96)[None] / 255
        save_images(image, folders[number // 2], number % 2)
    return Comparison([Task("a cat & <i>dog</i>", 1), Task("a very long prompt " * 9, 2)], rows)


def test_sheets_have_the_exact_images_on_top_and_tasks_across(comparison: Comparison) -> None:
    exact, setting = comparison.rows
    one_worse = replace(setting, images=(QUALITY, Quality(25.0, 0.97, 0.01)))
    whole = contact_sheet(comparison.tasks, comparison.rows)
    of_worst = contact_sheet(comparison.tasks, [exact, one_worse], worst_only=True)
    for sheet, order in ((whole, (0, 1, 2, 3)), (of_worst, (1, 0, 3, 2))):
        left, top = sheet.width - 2 * 100, sheet.height - 2 * 84
        found = [sheet.getpixel((left + x, top + y)) for y in (40, 124) for x in (48, 148)]
        assert found == [COLOURS[number] for number in order]
        assert sheet.crop((0, 0, left, sheet.height)).convert("L").getextrema()[0] < 100, "there are words beside them"
    assert exact.folder is not None
    save_images(torch.zeros(1, 3, 600, 300), exact.folder)
    assert contact_sheet(comparison.tasks, comparison.rows).height < 600, "large images are made smaller"


@pytest.mark.parametrize(
    "prompt", [NAME, "<!--<script>", "</script><script>alert(1)", "@DATA@ @TABLE@", "\\u003c \u2028 ]]>"]
)
def test_the_page_is_self_contained_and_no_prompt_empties_it(comparison: Comparison, prompt: str) -> None:
    quality = Quality(math.nan, math.inf, 0.0123)
    rows = [comparison.rows[0], replace(comparison.rows[1], method=Method(prompt, "any"), images=(quality, QUALITY))]
    shown = replace(comparison, tasks=[Task(prompt, 1), comparison.tasks[1]], rows=rows)
    text = page(shown, "emoji <50 steps>")
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:)[^"]+"|https?://|@import|url\(', text)
    assert '<input type="range"' in text
    assert text.count("</script>") == 2, "a name cannot end the script that holds it"
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found is not None
    assert "<" not in found[1], "a browser sees nothing in it but text"
    data = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (data["title"], data["verdict"], data["table"]) == ("emoji <50 steps>", shown.verdict(), table(rows))
    assert data["tasks"][0] == f"{prompt}, seed 1"
    assert [row["name"] for row in data["rows"]] == ["exact", prompt]
    assert data["rows"][1]["figures"] == [[None, None, 0.0123], [31.5, 0.97, 0.0123]]
    assert text.count("data:image/png;base64,") == 4, "each image once"


def test_figures_for_a_table(comparison: Comparison) -> None:
    heading, exact, setting = table(comparison.rows)
    assert heading == ["method", "computed", "speedup", "PSNR dB", "SSIM", "LPIPS"]
    assert setting == [NAME, "10", "2.00x", "31.50", "0.9700", "0.01230"]
    assert exact[3:] == [""] * 3, "the exact ones are near nothing but themselves"


def test_videos_are_compared_by_frames_and_motion(tmp_path: Path) -> None:
    """A tiny Wan, whose second denoiser takes the last steps."""
    video = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 3.0, "negative_prompt": "a dog"}
    params = OmniDiffusionSamplingParams(num_inference_steps=6, max_sequence_length=16, **video)
    runner = Runner(params=params, pipeline=PIPELINES["wan"].build(0), batch=2)
    session = Session(runner, TASKS[:2], Journal(tmp_path / "state", {}), is_timed=True)
    found = compare(session, [cached("tea_cache", {"schedule": "##.#.#"})], tmp_path)
    exact, skipping, _ = found.rows
    assert (exact.computed, skipping.computed) == (6, 4)
    assert all(5 < quality.psnr < 100 > (quality.motion or 0) > 5 for quality in skipping.images)
    assert table(found.rows)[0][-1] == "motion dB"
    assert skipping.to_dict()["each"]["motion"] == [round(quality.motion or 0, 7) for quality in skipping.images]
    for folder in (row.folder for row in found.rows):
        assert folder is not None
        assert sorted(file.name for file in folder.iterdir()) == ["0.mp4", "0.png", "1.mp4", "1.png"]
    assert skipping.folder is not None
    assert len(read_media(skipping.folder / "0.mp4", "a test")) == 5
    assert contact_sheet(found.tasks, found.rows).width > 2 * 4 * 16, "four frames of each"
