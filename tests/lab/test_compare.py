"""Every setting stands beside the exact images and plain steps of the same time, on a sheet and on a page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.tiny import TASKS, MakeSession, exact_images
from pipelines import PIPELINES
from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab.compare import Comparison, compare, contact_sheet, page, table, worst_sheet
from samovar.lab.journal import Journal
from samovar.lab.methods import Method, cached, plain
from samovar.lab.metrics import Quality, measure
from samovar.lab.runner import Runner
from samovar.lab.session import Row, Session, save_images
from samovar.lab.tasks import Task
from samovar.media import read_media


def test_each_setting_is_followed_by_as_many_plain_steps_as_it_computes(
    make_session: MakeSession, tmp_path: Path
) -> None:
    session = make_session(steps=8, is_timed=True)
    masks = {"##.#.#.#": 5, "##......": 2, "#......#": 2, "########": 7}
    found = compare(session, [cached("tea_cache", {"schedule": mask}) for mask in masks], tmp_path)
    assert [row.family for row in found.rows] == [
        "exact", "samovar schedule", "plain steps", "samovar schedule", "plain steps", "samovar schedule",
        "samovar schedule", "plain steps",
    ], "one baseline for two settings that compute as much"  # fmt: skip
    assert [row.steps for row in found.rows if row.family == "plain steps"] == [5, 2, 7]
    for folder in found.folders:
        assert sorted(file.name for file in folder.iterdir()) == ["0.png", "1.png", "2.png"]
    report = found.to_dict()
    assert [task["seed"] for task in report["tasks"]] == [0, 1, 2]
    assert len(report["rows"]) == len(found.rows)
    assert sum("all 3 images stay above" in line for line in report["verdict"]) == 3


def test_a_baseline_does_not_go_by_seconds(make_session: MakeSession, tmp_path: Path) -> None:
    """It once had 10 plain steps beside a setting that computed 6, as the machine slowed down between both."""
    session = make_session(steps=10, is_timed=True)
    clock = iter(range(1, 1000))
    session.runner._now = lambda: float(next(clock) ** 2)  # type: ignore[method-assign]
    found = compare(session, [cached("tea_cache", {"schedule": "###.#.#..#"})], tmp_path)
    assert [row.steps for row in found.rows] == [10, 10, 6]


def test_a_setting_given_twice_is_refused(make_session: MakeSession, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="given twice"):
        compare(make_session(), [cached("tea_cache", {}), cached("tea_cache", {})], tmp_path)
    assert not any(tmp_path.glob("*/*.png")), "and nothing is made"


def test_one_name_for_two_settings(make_session: MakeSession, tmp_path: Path) -> None:
    """A name leaves out weights, so two may share one. They are measured, and kept, each for itself."""
    masks = ("##.#", "#...")
    methods = [cached("tea_cache", {"schedule": mask}, name="mine") for mask in masks]
    rows = compare(make_session(steps=4), methods, tmp_path).rows
    assert [row.computed for row in rows if row.method == "mine"] == [3, 1]
    again = Method("mine", "any", {"weights": {1: {0: 2.0}}})
    assert again.key == Method("mine", "any", {"weights": {"1": {"0": 2.0}}}).key, "loaded from a file it is the same"


COLOURS = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 0]])


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two rows of two images of one colour each."""
    quality = Quality(31.5, 0.97, 0.0123)
    rows = [
        Row("exact", "exact", {}, 50, 50, Quality(100, 1, 0), (Quality(100, 1, 0),) * 2, 50, 2.0, 1.0),
        Row("</script><b>x", "samovar", {}, 50, 20, quality, (quality, quality), 50, 1.0, 2.0),
    ]
    folders = [tmp_path / "exact", tmp_path / "setting-1"]
    for number, colour in enumerate(COLOURS):
        save_images(colour.view(3, 1, 1).expand(3, 80, 96)[None], folders[number // 2], number % 2)
    return Comparison([Task("a cat & <i>dog</i>", 1), Task("a very long prompt " * 9, 2)], rows, folders)


def test_the_exact_ones_are_on_top_and_tasks_across(comparison: Comparison) -> None:
    sheet = contact_sheet(comparison)
    left, top = sheet.width - 2 * 100, sheet.height - 2 * 84
    centres = [(left + 48, top + 40), (left + 148, top + 40), (left + 48, top + 124), (left + 148, top + 124)]
    found = [sheet.getpixel(centre) for centre in centres]
    assert found == [tuple(int(255 * c) for c in colour) for colour in COLOURS.tolist()]
    darkest, _ = sheet.crop((0, 0, left, sheet.height)).convert("L").getextrema()
    assert darkest < 100, "there are words beside them"


def test_the_page_is_self_contained(comparison: Comparison) -> None:
    text = page(comparison, "emoji <50 steps>")
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:)[^"]+"|https?://|@import|url\(', text)
    assert "<title>emoji &lt;50 steps&gt;</title>" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert [row["name"] for row in data["rows"]] == ["exact", "</script><b>x"]
    assert all(image.startswith("data:image/png;base64,") for row in data["rows"] for image in row["images"])
    assert data["rows"][1]["figures"] == [[31.5, 0.97, 0.0123]] * 2
    assert text.count("</script>") == 2, "a name cannot end the script that holds it"
    assert "<td>&lt;/script&gt;&lt;b&gt;x</td>" in text
    assert '<input type="range"' in text


@pytest.mark.parametrize(
    "prompt", ["<!--<script>", "</script><script>alert(1)", "@DATA@ @TABLE@", "\\u003c \u2028 ]]>"]
)
def test_no_prompt_empties_the_page(comparison: Comparison, prompt: str) -> None:
    quality = Quality(math.nan, math.inf, 0.0123)
    rows = [comparison.rows[0], replace(comparison.rows[1], method=prompt, images=(quality, quality))]
    tasks = [Task(prompt, 1), comparison.tasks[1]]
    text = page(replace(comparison, tasks=tasks, rows=rows), prompt)
    found = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert found is not None
    assert "<" not in found[1], "a browser sees nothing in it but text"
    data = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["tasks"][0] == f"{prompt}, seed 1"
    assert data["rows"][1]["name"] == prompt
    assert data["rows"][1]["figures"][0] == [None, None, 0.0123]
    assert text.count("data:image/png") == 4, "each image once"


def test_figures_for_a_table(comparison: Comparison) -> None:
    heading, exact, setting = table(comparison.rows)
    assert heading == ["method", "computed", "speedup", "PSNR dB", "SSIM", "LPIPS"]
    assert setting == ["</script><b>x", "20", "2.00x", "31.50", "0.9700", "0.01230"]
    assert exact[3:] == [""] * 3, "the exact ones are near nothing but themselves"


def test_the_worst_images_are_beside_the_exact_ones(comparison: Comparison) -> None:
    exact, setting = comparison.rows
    values = (Quality(31.5, 0.97, 0.01), Quality(25.0, 0.97, 0.01))
    sheet = worst_sheet(
        comparison.tasks, exact, comparison.folders[0], replace(setting, images=values), comparison.folders[1]
    )
    left, top = sheet.width - 2 * 100, sheet.height - 2 * 84
    found = [sheet.getpixel((left + x, top + y)) for y in (40, 124) for x in (48, 148)]
    assert found == [tuple(int(255 * c) for c in COLOURS[number].tolist()) for number in (1, 0, 3, 2)]


def test_large_images_are_made_smaller_on_the_sheet(tmp_path: Path) -> None:
    quality = Quality(100, 1, 0)
    save_images(torch.zeros(1, 3, 600, 300), tmp_path)
    row = Row("exact", "exact", {}, 1, 1, quality, (quality,), 1)
    assert contact_sheet(Comparison([Task("a", 0)], [row], [tmp_path])).height < 300


def test_videos_are_compared_by_frames_and_motion(tmp_path: Path) -> None:
    """A tiny Wan, whose second denoiser takes the last steps."""
    video = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 3.0, "negative_prompt": "a dog"}
    params = OmniDiffusionSamplingParams(num_inference_steps=6, max_sequence_length=16, **video)
    runner = Runner(params=params, pipeline=PIPELINES["wan"].build(0), batch=2)
    session = Session(runner, TASKS[:2], Journal(tmp_path / "state", {}), is_timed=True)
    found = compare(session, [cached("tea_cache", {"schedule": "##.#.#"}), cached("auto", {})], tmp_path)
    exact, skipping = found.rows[:2]
    assert (exact.computed, skipping.computed) == (6, 4)
    assert exact_images(session).shape == (2, 5, 3, 16, 16)
    with runner.under(plain(3)) as make:
        three = make(TASKS[:1]).images
    (quality,) = measure(three, exact_images(session)[:1])
    assert quality.motion is not None
    assert 5 < quality.psnr < 100 > quality.motion > 5
    assert skipping.quality.motion is not None
    assert table(found.rows)[0][-1] == "motion dB"
    assert skipping.to_dict()["each"]["motion"] == [round(q.motion or 0, 7) for q in skipping.images]
    for folder in found.folders:
        names = sorted(file.name for file in folder.iterdir())
        assert names == ["0.mp4", "0.png", "1.mp4", "1.png"]
    assert len(read_media(found.folders[1] / "0.mp4", "a test")) == 5
    assert contact_sheet(found).width > 2 * 4 * 16, "four frames of each"
    assert '"figures": [[' in page(found, "videos")
