"""Every setting stands beside the exact images and plain steps of the same time, on a sheet and on a page."""

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
from samovar.lab.compare import Comparison, compare, contact_sheet, figures, page, same_time_steps
from samovar.lab.image_runner import ImageRunner, Task
from samovar.lab.methods import Method, cached, plain
from samovar.lab.metrics import Quality, measure
from samovar.lab.session import Journal, Row, Session, save_images
from samovar.media import read_media


def test_each_setting_is_followed_by_its_baseline(make_session: MakeSession, tmp_path: Path) -> None:
    session = make_session(steps=8, timed=1)
    methods = [cached("tea_cache", {"schedule": "##.#.#.#"}), cached("tea_cache", {"schedule": "##......"})]
    found = compare(session, methods, tmp_path)
    assert found.rows[0].family == "exact"
    assert [row.method for row in found.rows if row.family.startswith("samovar")] == [m.name for m in methods]
    plains = [row for row in found.rows if row.family == "plain steps"]
    settings = [row for row in found.rows if row.family.startswith("samovar")]
    one = session.measure(plain(1))
    assert {row.steps for row in plains} == {same_time_steps(found.rows[0], one, row) for row in settings}
    assert {folder.name for folder in tmp_path.iterdir() if "-" in folder.name} - {"state-"} == {
        folder.name for folder in found.folders[1:]
    }, "and nothing is left of the one step that was measured to know what each takes"
    for folder in found.folders:
        assert sorted(file.name for file in folder.iterdir()) == ["0.png", "1.png", "2.png"]
    report = found.to_dict()
    assert [task["seed"] for task in report["tasks"]] == [0, 1, 2]
    assert len(report["rows"]) == len(found.rows)


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, 11), (3.0, 19), (4.0, 19), (0.5, 1), (1.6, 7)])
def test_plain_steps_of_the_same_time(seconds: float, steps: int) -> None:
    """Twenty steps take 2.9 s; text encoders and VAE one second, which no setting saves."""
    exact, one = (timed(steps, 0.9 + 0.1 * steps) for steps in (20, 1))
    assert same_time_steps(exact, one, timed(20, seconds, computed=1)) == steps


def test_plain_steps_are_never_fewer_than_a_setting_computes() -> None:
    """`compare` once put 7 plain steps beside a setting that computed 14, as something else slowed the exact images."""
    exact, one = timed(50, 6.0), timed(1, 1.0)
    assert same_time_steps(exact, one, timed(50, 1.5, computed=14)) == 14
    assert same_time_steps(timed(20, 1.0), timed(1, 1.0), timed(20, 0.5, computed=10)) == 10, "steps that take no time"
    assert same_time_steps(timed(20, None), timed(1, None), timed(20, None, computed=8)) == 8, "nothing was timed"


def test_a_speedup_that_counts_do_not_explain_is_marked(comparison: Comparison) -> None:
    rows = [replace(comparison.rows[1], speedup=speedup, explained=2.5) for speedup in (2.6, 12.05)]
    assert [figures(row.to_dict())["speedup"] for row in rows] == ["2.60x", "12.05x?"]
    text = page(replace(comparison, rows=[comparison.rows[0], rows[1]]), "a title")
    assert "2.50x at most is what its computed steps explain" in text
    assert "at most is what" not in page(comparison, "a title")


def timed(steps: int, seconds: float | None, computed: float | None = None) -> Row:
    quality = Quality(40, 1, 0)
    return Row("a", "a", {}, steps, computed or steps, seconds, None, quality, (quality,))


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
        Row("exact", "exact", {}, 50, 50, 2.0, 1.0, Quality(100, 1, 0), (Quality(100, 1, 0),) * 2),
        Row("</script><b>x", "samovar", {}, 50, 20, 1.0, 2.0, quality, (quality, quality)),
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
    assert list(figures(comparison.rows[1].to_dict()).values()) == [
        "</script><b>x",
        "20",
        "2.00x",
        "31.50",
        "0.9700",
        "0.01230",
    ]
    assert figures(comparison.rows[0].to_dict())["PSNR dB"] == "", "the exact ones are near nothing but themselves"


def test_large_images_are_made_smaller_on_the_sheet(tmp_path: Path) -> None:
    quality = Quality(100, 1, 0)
    save_images(torch.zeros(1, 3, 600, 300), tmp_path)
    row = Row("exact", "exact", {}, 1, 1, 1.0, 1.0, quality, (quality,))
    assert contact_sheet(Comparison([Task("a", 0)], [row], [tmp_path])).height < 300


def test_videos_are_compared_by_frames_and_motion(tmp_path: Path) -> None:
    """A tiny Wan, whose second denoiser takes the last steps."""
    video = {"height": 16, "width": 16, "num_frames": 5, "guidance_scale": 3.0, "negative_prompt": "a dog"}
    params = OmniDiffusionSamplingParams(num_inference_steps=6, max_sequence_length=16, **video)
    runner = ImageRunner(params=params, pipeline=PIPELINES["wan"].build(0), batch=2)
    session = Session(runner, TASKS[:2], Journal(tmp_path / "state", {}), timed=1)
    found = compare(session, [cached("tea_cache", {"schedule": "##.#.#"}), cached("auto", {})], tmp_path)
    exact, skipping = found.rows[:2]
    assert (exact.computed, skipping.computed) == (6, 4)
    assert session.exact_images().shape == (2, 5, 3, 16, 16)
    with runner.under(plain(3)) as make:
        three = make(TASKS[:1]).images
    (quality,) = measure(three, session.exact_images()[:1])
    assert quality.motion is not None
    assert 5 < quality.psnr < 100 > quality.motion > 5
    assert skipping.quality.motion is not None
    assert "motion dB" in figures(skipping.to_dict())
    assert skipping.to_dict()["each"]["motion"] == [round(q.motion or 0, 7) for q in skipping.images]
    for folder in found.folders:
        names = sorted(file.name for file in folder.iterdir())
        assert names == ["0.mp4", "0.png", "1.mp4", "1.png"]
    assert len(read_media(found.folders[1] / "0.mp4", "a test")) == 5
    assert contact_sheet(found).width > 2 * 4 * 16, "four frames of each"
    assert '"figures": [[' in page(found, "videos")
