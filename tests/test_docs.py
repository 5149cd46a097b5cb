"""What the documentation says is run: Python blocks of the README, commands, links, and the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import samovar
from samovar import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", PYTHON, ids=[f"block {number}" for number in range(1, len(PYTHON) + 1)])
def test_python_of_the_readme_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    pictures = sorted(file.name for file in tmp_path.iterdir())
    assert pictures == (["red heart, noto style.png", "rocket, flat style.png"] if "Omni" in code else [])


def test_commands_of_the_readme_are_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile
    for command in re.findall(r"samovar (\w+) ", "\n".join(re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL))):
        with pytest.raises(SystemExit) as exited:
            cli.main([command, "--help"])
        assert exited.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_room_is_in_the_readme() -> None:
    for entry in (ROOT / "src" / "samovar").iterdir():
        if entry.name not in ("__init__.py", "__main__.py", "__pycache__", "py.typed"):
            assert re.search(rf"^\s+{entry.name}", README, flags=re.MULTILINE), f"{entry.name} is not in the tree"


def test_the_changelog_knows_the_version() -> None:
    assert f"\n## {samovar.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
