"""What the documentation says holds: its code runs, its commands parse, its links and names lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest

import samovar
from benchmarks import regimes_table
from docs.generate import code, diagrams, pages, plots, quantised, results, tables
from pipelines import PIPELINES
from samovar import cli
from samovar.arch.declarations import DECLARATIONS
from samovar.builtin import BUILTIN_MODELS
from samovar.cache import EXTRACTOR_REGISTRY
from samovar.cli.entry import make_parser
from server.running import running

ROOT = Path(__file__).parents[1]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
PAGES = [README, CONTRIBUTING, *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "http://127.0.0.1:8091"
"""Where the pages say that a server listens."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=name_of(page)) for page in PAGES if blocks_of(page, language)]


@pytest.fixture(scope="module")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, which makes images in as few steps as a cache skips any of."""
    folder = tmp_path_factory.mktemp("models") / "emoji"
    shutil.copytree(BUILTIN_MODELS["emoji"], folder)
    defaults = json.loads((folder / "samovar.json").read_text())
    (folder / "samovar.json").write_text(json.dumps(defaults | {"num_inference_steps": 18}))
    return folder


@pytest.fixture
def few_steps(quick_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "emoji", quick_model)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_steps: None) -> Iterator[dict[str, Any]]:
    """What a reader has at hand: a pipeline, and models to download. What is declared is forgotten afterwards."""
    declared, extracted = dict(DECLARATIONS), dict(EXTRACTOR_REGISTRY)
    pipe = PIPELINES["flux"].build(0)
    usual = type(pipe).__call__

    def small(self: Any, prompt: str, **given: Any) -> Any:
        """The call of the page, at a size for a test."""
        size = {"height": 16, "width": 16, "max_sequence_length": 8, "num_inference_steps": 8}
        return usual(self, prompt, **given | size)

    pipe.__class__ = type("FluxPipeline", (type(pipe),), {"__call__": small})
    download = diffusers.FluxPipeline.from_pretrained

    def from_pretrained(name: Any, **given: Any) -> Any:
        return pipe if name == "black-forest-labs/FLUX.1-dev" else download(name, **given)

    monkeypatch.setattr("diffusers.FluxPipeline.from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)
    yield {"__name__": "page", "pipe": pipe}
    for registry, before in ((DECLARATIONS, declared), (EXTRACTOR_REGISTRY, extracted)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a server with the built-in model listens."""
    with running("emoji") as server:
        yield server.wait_ready().address


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_of_a_page_runs_from_top_to_bottom(
    page: Path, reader: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    for block in blocks_of(page, "python"):
        if ADDRESS in block:
            block = block.replace(ADDRESS, request.getfixturevalue("address"))
        # The compiler of torch takes half a minute for what a plain one shows as well.
        exec(compile(block.replace("compile=True", 'compile="eager"'), name_of(page), "exec"), reader)
    if page == README:
        assert reader["result"].cache[0].skipped, "the cache of the README skips nothing"


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every `samovar` command in the shell blocks of a page."""
    for block in blocks_of(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            plain = re.sub(r"\$\(\(.*?\)\)", "1", line.partition("  #")[0]).rstrip(" &")
            if found := re.search(r"(?:^|\s)samovar (.*)", plain):
                yield shlex.split(found[1])


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_of_a_page_are_understood(page: Path) -> None:
    parser = make_parser()
    for words in commands_of(page):
        assert parser.parse_args(words).run, words
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks_of(page, "sh"))):
        assert f"\n{target}:" in makefile


def test_commands_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_steps: None) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [words for words in commands_of(README) if words[0] != "serve"]
    assert {words[0] for words in commands} == {"generate", "inspect", "plan"}
    for words in commands:
        short = ["--steps", "10"] if "--steps" in words else []
        assert cli.main([*words, *short]) == 0, words
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cat.png", "rocket.png"]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
@pytest.mark.parametrize("page", [page for page in pages_with("sh") if "curl " in page.values[0].read_text()])
def test_requests_by_curl_are_answered(page: Path, address: str) -> None:
    for block in blocks_of(page, "sh"):
        if block.startswith("curl"):
            answer = subprocess.run(["bash", "-c", block.replace(ADDRESS, address)], capture_output=True, check=True)
            assert json.loads(answer.stdout)["data"][0]["b64_json"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_tables(page: Path) -> None:
    """A row that stands alone is shown with its bars, as text."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        _, *rest = table.splitlines()
        assert rest, table
        assert re.fullmatch(r"\|(?: *:?-+:? *\|)+", rest[0]), table


def test_every_guide_is_listed_where_people_look() -> None:
    guides = {page.name for page in (ROOT / "docs" / "guides").glob("*.md")} - {"index.md"}
    for page, folder in ((README, "docs/guides/"), (ROOT / "docs" / "guides" / "index.md", "")):
        linked = set(re.findall(rf"\]\({folder}([\w-]+\.md)", page.read_text(encoding="utf-8")))
        assert guides <= linked, page


def test_the_first_example_is_for_the_card_that_it_names() -> None:
    """Who has 12 GiB must not budget all of them: the driver needs some."""
    guide = (ROOT / "docs" / "guides" / "index.md").read_text(encoding="utf-8")
    (budget,) = re.findall(r'^\| 12 GiB \| `gpu_memory="(\w+)"', guide, re.MULTILINE)
    for page in (README, ROOT / "docs" / "index.md", ROOT / "docs" / "getting-started.md"):
        first = next(block for block in blocks_of(page, "python") if "attach" in block)
        assert f'gpu_memory="{budget}"' in first, page


@pytest.mark.slow
def test_plans_are_printed_as_pages_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guides" / "offload.md").read_text(encoding="utf-8")
    shown = re.findall(r"```sh\nsamovar (plan [^\n]*)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert len(shown) == 2
    for command, expected in shown:
        assert cli.main(shlex.split(command)) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in expected.splitlines() if line not in printed] == [], command


@pytest.mark.parametrize("page", pages.generated_pages(), ids=name_of)
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.expand(text) == text, "run `make pages`"


@pytest.mark.parametrize("path", re.findall(r"generate: settings (\S+)", SETTINGS.read_text(encoding="utf-8")))
def test_every_setting_is_explained(path: str) -> None:
    assert [name for name, _, _, meaning in code.fields_of(code.named(path)) if not meaning] == []


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    assert f"\n{tables.headlines()}\n" in README.read_text(encoding="utf-8")


def test_a_skipped_step_beside_other_libraries_is_as_measured() -> None:
    found = results.read("gpu_offload")
    ours, theirs = found["flux"]["skip"]["skip_ms"], found["peers"]["group_skip_ms"]
    assert f"| {ours:.1f} ms, no weights moved | {theirs:.0f} ms |" in README.read_text(encoding="utf-8")


def test_every_file_that_contributing_names_exists() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]*)`", text)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path


def test_every_room_is_in_contributing() -> None:
    text = CONTRIBUTING.read_text(encoding="utf-8")
    for entry in code.SOURCE.iterdir():
        if entry.name not in ("__init__.py", "__main__.py", "__pycache__", "py.typed"):
            assert f"`{entry.name}`" in text, f"{entry.name} is not among the rooms"


def test_every_source_file_is_in_the_tree_with_its_purpose() -> None:
    tree = code.source_tree()
    for file in code.SOURCE.rglob("*.py"):
        if file.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"^\s+{file.name} +\S", tree, flags=re.MULTILINE), file


def test_reasons_of_computed_steps_are_those_of_the_cache() -> None:
    text = (ROOT / "docs" / "guides" / "cache.md").read_text(encoding="utf-8")
    table = text.partition("reason in `stats()` |")[2].partition("\n\n")[0]
    source = "".join(file.read_text(encoding="utf-8") for file in (code.SOURCE / "cache").glob("*.py"))
    reasons = [reason for row in table.splitlines() for reason in re.findall("`(.*?)`", row.rpartition(" | ")[2])]
    assert len(reasons) >= 6
    assert [reason for reason in reasons if f'"{reason}"' not in source] == []


def test_every_error_code_has_a_remedy() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE))
    assert code.codes() <= described
    source = "".join(file.read_text(encoding="utf-8") for file in code.SOURCE.rglob("*.py"))
    assert {name for name in described if f'"{name}"' not in source} == set()


def test_every_error_class_has_a_remedy() -> None:
    text = pages.expand((ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8"))
    for name in re.findall(r"[├└]── (\w+)", samovar.core.errors.__doc__ or ""):
        assert f"`{name}`" in text


def test_extras_that_are_named_can_be_installed() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for file in (*PAGES, *code.SOURCE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        for found in re.findall(r"'(?:\.|samovar)\[([\w,]+)\]|the extra `(\w+)`", file.read_text(encoding="utf-8")):
            assert set("".join(found).split(",")) <= set(extras), file


@pytest.mark.parametrize("name", diagrams.DIAGRAMS)
def test_diagrams_are_as_drawn(name: str) -> None:
    file = diagrams.IMAGES / f"diagram-{name}.svg"
    assert file.read_text(encoding="utf-8") == diagrams.DIAGRAMS[name](), "run `make diagrams`"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_plots_are_of_the_present_results(name: str) -> None:
    file = plots.IMAGES / f"{name}.svg"
    assert plots.origin(plots.PLOTS[name][1]) in file.read_text(encoding="utf-8"), "run `make diagrams`"


def test_what_is_said_about_cards_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "benchmarks/results/gpu_cards.json").read_text())["flux"]
    for page in (README, ROOT / "docs" / "guides" / "index.md"):
        found = re.findall(
            r'^\| \d+ GiB \| `gpu_memory="(\w+)"`.* 4 steps take ([\d.]+) times .*GPU(?:, 20 steps ([\d.]+) times)? ',
            page.read_text(),
            re.MULTILINE,
        )
        assert len(found) == 4
        for budget, few, many in found:
            assert float(few) == round(rows[budget]["of_resident"]["4"], 2)
            assert rows[budget]["same_images"] == rows[budget]["of_images"] > 0
            assert not many or float(many) == round(rows[f"{budget} 20 steps"]["of_resident"]["20"], 2)


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## {samovar.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ regimes


def regime_row(family: str, computed: float, psnr: float, lpips: float = 1e-3, worst: float = 20.0) -> dict[str, Any]:
    figures = {"psnr": psnr, "psnr_5th": worst, "psnr_worst": worst, "lpips": lpips, "lpips_worst": lpips}
    return {"method": f"{family} {computed}", "family": family, "computed": computed, **figures}


def test_regimes_are_compared_at_equal_counts_and_never_beyond_a_curve() -> None:
    curve = [regime_row("plain steps", 4, 30, 1e-2, 10), regime_row("plain steps", 8, 40, 1e-4, 20)]
    middle = regimes_table.at(curve, 6)
    assert middle is not None
    assert (middle.psnr, middle.psnr_worst) == (35, 15)
    assert middle.lpips == pytest.approx(1e-3), "by its logarithm"
    assert [regimes_table.at(curve, count) for count in (3.9, 8.1)] == [None, None]
    assert regimes_table.at(curve[:1], 4) == regimes_table.Point(30, 10, pytest.approx(1e-2))


def test_goals_of_a_cell_are_judged_by_the_best_of_each_figure() -> None:
    others = [regime_row("plain steps", 11, 40, 1e-3, 25), regime_row("peer", 11, 42, 4e-3, 20)]
    tuned = {"near": (45.1, 4e-4, 25), "no +3": (44.9, 4e-4, 25), "LPIPS": (46, 6e-4, 25), "worst": (46, 4e-4, 24)}
    found = {}
    for name, figures in tuned.items():
        rows = [*others, regime_row("samovar schedule", 11, *figures), regime_row("samovar auto", 11, 42, 1e-3, 26)]
        (line,) = regimes_table.lines_of({"20-2-pairs-euler": rows})
        assert (line.computed, line.best.nearest) == (11, "peer")
        assert line.auto_is_met
        found[name] = line.tuned_is_met
    assert found == {"near": True, "no +3": False, "LPIPS": False, "worst": False}
    text = regimes_table.markdown({"cells": {"20-2-pairs-euler": rows}})
    assert "| 20-2-pairs-euler | 11 | peer | 42.0, 25.0, 0.001 | +0.0 | +1.0 | x 1.00 | +4.0 | -1.0 | x 0.40 |" in text
    *_, auto, tuned_verdict = text.split("\n\n")
    assert auto == ("`auto` meets its goal in 1 of 1 cells, which is the goal; it is ahead in 1 of 1 comparisons, by "
                    "0.0 dB on average (pairs +0.0); its worst image in 1, by 1.0 dB; its LPIPS is at most half of "
                    "theirs in 0.")  # fmt: skip
    assert tuned_verdict.startswith("`tuned` meets its goal in 0 of 1 cells, and the goal is 1; it is ahead in 1 of 1 ")


def test_a_schedule_is_judged_at_what_it_computes() -> None:
    plain = [regime_row("plain steps", 8, 30), regime_row("plain steps", 16, 46)]
    (line, *_) = regimes_table.lines_of({"20-2-pairs-euler": [*plain, regime_row("samovar schedule", 11.5, 44)]})
    assert (line.computed, line.best.point.psnr, line.tuned_is_met) == (11.5, 37, False)
    assert line.tuned is not None
    (line, *_) = regimes_table.lines_of({"20-2-pairs-euler": [*plain, regime_row("samovar schedule", 13.5, 44)]})
    assert (line.computed, line.tuned) == (11, None), "planned for another count"


def test_what_the_guide_says_of_quantised_weights_was_measured() -> None:
    text = " ".join((ROOT / "docs" / "guides" / "quantise.md").read_text(encoding="utf-8").split())
    found = results.read("gpu_quantised")
    flux, rows = found["flux"], [row for model in ("flux", "qwen") for row in found[model].values()]

    def between(values: list[float], form: str) -> str:
        return f"{min(values):{form}} to {max(values):{form}}"

    slower = {
        kind: f"{100 * flux[kind]['within'][0]['over_resident']:.1f} %" for kind in ("nf4", "gguf-q4", "sdnq-uint4")
    }
    gguf, added = flux["gguf-q4"], [row["host_gib_after"] - row["host_gib_before"] for row in rows]
    eight = [row["pinned_of_weights"] for row in rows if row["ahead_gib"]]
    peers = [flux[k]["group_offload"]["ms"] / flux[k]["least_measured"]["ms"] for k in ("gguf-q4", "sdnq-uint4")]
    for words in (
        f"{between([100 * row['least']['over_limit'] for row in rows], '.0f')} % more than the bound",
        f"are {slower['nf4']} (nf4), {slower['gguf-q4']} (GGUF Q4_0) and {slower['sdnq-uint4']} (sdnq) slower",
        f"GGUF is {100 * gguf['least_measured']['over_limit']:.1f} % slower",
        f"{gguf['within'][0]['launch_ms']:.0f} of its {gguf['within'][0]['blocks_ms']:.0f} ms",
        f"{peers[0]:.1f} and {peers[1]:.1f} times as long",
        f"{between(added, '.1f')} GiB, which makes {between(list(map(quantised.host_memory, rows)), '.2f')} times the",
        f"themselves take {between([row['host_gib_before'] - row['weights_gib'] for row in rows], '.1f')} GiB more",
        f"are {between(eight, '.2f')} of the weights in 8 bits",
    ):
        assert words in text, words
    above = {kind for kind, row in flux.items() if round(quantised.host_memory(row), 2) > 1.05}
    assert above == {"int8", "nf4"}
    assert not any(round(quantised.host_memory(row), 2) > 1.05 for row in found["qwen"].values())
    assert not any(row["skip"]["skip_moved_bytes"] for row in rows)
    assert all(row["least_measured"]["bound"] == "computing" for row in flux.values())
