"""The list of faults is whole, its patches fit the source, and the script tells found faults from others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from .run import BROKEN, OUT_OF_TIME, ROOT, Fault, PatchError, main, patched, read_faults, try_fault

FAULTS = read_faults()
TOY = """\
def double(x):
    return 2 * x  # Twice.


def half(x):
    return x / 2


def third(x):
    return x / 3
"""
TESTS = {
    "first/test_double.py": "import toy\n\ndef test_double(): assert toy.double(2) == 4\n",
    "first/test_half.py": "import toy\n\ndef test_half(): assert toy.half(2) == 1\n",
    "second/test_broken.py": "def test_broken(): assert False\n",
}


def fault(patch: str, *tests: str, id: str = "first-fault") -> Fault:
    return Fault(id, id.partition("-")[0], "It is wrong.", "It matters.", tests, patch)


def diff(old: str, new: str, file: str = "src/toy/__init__.py") -> str:
    return f"+++ {file}\n@@\n-    return {old}\n+    return {new}\n"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a package, and tests of two rooms. Its pytest starts quickly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {"src/toy/__init__.py": TOY, **{f"tests/{name}": text for name, text in TESTS.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_room_has_faults_and_each_is_described() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    rooms = {folder.parent.name for folder in (ROOT / "src/samovar").glob("*/__init__.py")}
    assert {fault.room for fault in FAULTS} == rooms - {"builtin"}, "the models that come with Samovar are data"
    for each in FAULTS:
        assert each.id.startswith(f"{each.room}-")
        assert each.wrong.endswith(".")
        assert each.matters.endswith(".")
        assert each.tests
        assert all(test.startswith("tests/") for test in each.tests)


def test_every_patch_still_applies() -> None:
    problems = {}
    for each in FAULTS:
        try:
            if each.patch.strip():
                patched(each)
        except PatchError as error:
            problems[each.id] = str(error)
    assert not problems, "adapt these patches, and see with tests/mutants/run.py --only ID that they are still found"


def test_a_patch_is_what_git_prints_or_the_same_by_hand(toy: Path) -> None:
    printed = """\
diff --git a/src/toy/__init__.py b/src/toy/__init__.py
index 1111111..2222222 100644
--- a/src/toy/__init__.py
+++ b/src/toy/__init__.py
@@ -1,5 +1,5 @@ a heading
 def double(x):
-    return 2 * x  # Twice.
+    return 3 * x  # Twice.


 def half(x):
@@ -10,2 +10,2 @@
 def third(x):
-    return x / 3
+    return x / 4
"""
    changed = TOY.replace("2 * x", "3 * x").replace("x / 3", "x / 4")
    assert patched(fault(printed), toy) == ("src/toy/__init__.py", changed)
    assert patched(fault(diff("x / 3", "x / 4")), toy)[1] == TOY.replace("x / 3", "x / 4")
    assert (toy / "src/toy/__init__.py").read_text() == TOY


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (diff("x / 9", "x / 4"), "0 places"),
        ("+++ src/toy/__init__.py\n@@\n \n+x = 1\n \n", "2 places"),
        ("+++ src/toy/__init__.py\n@@\n+x = 1\n", "0 places"),
        (diff("2 * x  # Twice.", "2 * x"), "changes no code"),
        (diff("x / 3", "x /"), "no Python any more"),
        (diff("x / 3", "x / 4") + diff("x / 2", "x / 4"), "not a line of a diff"),
        (diff("x / 3", "x / 4") + "diff --git a/src/toy/other.py b/src/toy/other.py\n", "not a line of a diff"),
        (diff("x / 3", "x / 4", "tests/first/test_half.py"), "not a file of the source"),
        (diff("x / 3", "x / 4", "src/../src/toy/__init__.py"), "not a file of the source"),
        ("-x\n+y\n", "not a line of a diff"),
        ("+++ src/toy/__init__.py\n", "needs a line"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused(toy: Path, patch: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        patched(fault(patch), toy)


def test_a_test_that_is_not_there_is_refused(toy: Path) -> None:
    with pytest.raises(PatchError, match=r"test_gone\.py does not exist"):
        patched(fault(diff("x / 3", "x / 4"), "tests/first/test_gone.py"), toy)


def test_faults_are_found_by_tests_that_pass_without_them(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {
        "first-named": (diff("2 * x  # Twice.", "3 * x"), "tests/first/test_double.py::test_double"),
        "first-by-its-room": (diff("x / 2", "x / 5"), "tests/first/test_double.py"),
        "first-missed": (diff("x / 3", "x / 4"), "tests/first"),
        "first-import": ("+++ src/toy/__init__.py\n@@\n+import nothing\n def half(x):\n", "tests/first"),
        "second-anyway": (diff("x / 3", "x / 4"), "tests/second/test_broken.py"),
        "second-old": (diff("x / 9", "x / 4"), "tests/second"),
        "second-open": ("", "tests/second"),
    }
    entry = "[[fault]]\nid='{}'\nroom='{}'\nwrong='It is.'\nmatters='It does.'\ntests=['{}']\npatch='''\n{}'''\n"
    written = [entry.format(id, id.partition("-")[0], test, patch) for id, (patch, test) in listed.items()]
    (toy / "tests/mutants").mkdir()
    (toy / "tests/mutants/faults.toml").write_text("\n".join(written))
    assert main(["-j", "2"], toy) == 1, "57 are not found"
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert "found" in rows["first-named"]
    assert rows["first-by-its-room"].endswith("tests/first/test_half.py::test_half")
    assert rows["first-missed"].startswith("NOT FOUND")
    assert rows["first-import"].startswith("CANNOT RUN")
    assert rows["second-anyway"].startswith("FAILS WITHOUT IT")
    assert rows["second-old"].startswith(BROKEN)
    assert rows["second-open"].startswith("open")
    assert main(["--only", "second-open"], toy) == 0
    assert main(["--room", "second", "--only", "second-old"], toy) == 1
    for mistake in (["--only", "second-none"], ["--room", "third"], ["-j", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(mistake, toy)


def test_a_run_has_a_time_limit(toy: Path) -> None:
    result = asyncio.run(try_fault(fault(diff("2 * x  # Twice.", "3 * x"), "tests/first"), toy, 0.01))
    assert result.verdict == OUT_OF_TIME
