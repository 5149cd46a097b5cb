"""The package as it would be published: what is in it, what it says about itself, and that it works once installed.

`dist` is built once. The tests of the normal run install it beside the libraries of this environment; the slow one
downloads all of them into an empty environment, as `pip install samovar` does.
"""

from __future__ import annotations

import base64
import email.message
import email.parser
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import samovar
from samovar.builtin import BUILTIN_MODELS

ROOT = Path(__file__).parents[1]
LARGEST_WHEEL = 64 * 2**20
"""Bytes; a package index takes 100 MB. The built-in models and the weights of LPIPS are most of it."""
PROMPT = "rocket, flat style"
LINK = re.compile(r"""\]\(([^)]*)\)|(?:src|href|srcset)=["']([^"']*)""")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel; everything else is read from this environment.

    The `.pth` only appends folders to the path, so neither an editable Samovar there nor `src` is seen.
    """
    home = tmp_path_factory.mktemp("environment")
    bin_folder = make_environment(home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    pip(bin_folder, "--no-deps", "--no-index", wheel)
    return bin_folder


def build(source: Path, folder: Path, *targets: str) -> None:
    chosen = [word for target in targets for word in ("--target", target)]
    run([sys.executable, "-m", "hatchling", "build", "--directory", folder, *chosen], cwd=source)


def make_environment(home: Path) -> Path:
    venv.create(home, symlinks=True)
    return home / "bin"


def pip(bin_folder: Path, *arguments: object) -> None:
    run([sys.executable, "-m", "pip", "--python", bin_folder / "python", "install", "--quiet", *arguments])


def run(command: list[object], *, cwd: Path | None = None, expect: int = 0) -> subprocess.CompletedProcess[str]:
    found = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    assert found.returncode == expect, found.stdout + found.stderr
    return found


def environment() -> dict[str, str]:
    """That of a user: nothing points into this repository."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.parser.BytesParser().parsebytes(archive.read(name))


def contents(wheel: Path) -> dict[str, int]:
    """Files of the wheel with their checksums, without those that describe the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist() if ".dist-info/" not in info.filename}


def test_the_wheel_holds_the_source_and_nothing_else(wheel: Path) -> None:
    source = [file for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    packed = contents(wheel)
    assert set(packed) == {file.relative_to(ROOT / "src").as_posix() for file in source}
    assert {name.split("/")[0] for name in packed} == {"samovar"}
    models = [f"builtin/{model}/{file}" for model in BUILTIN_MODELS for file in ("NOTICE", "model_index.json")]
    needed = ("py.typed", *models, "server/page/index.html")
    assert {f"samovar/{name}" for name in needed} <= set(packed)
    assert wheel.stat().st_size < LARGEST_WHEEL


def test_the_source_distribution_builds_the_same_wheel(dist: Path, wheel: Path, tmp_path: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = packed.getnames()
        packed.extractall(tmp_path, filter="data")
    top = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not [name for name in names if "__pycache__" in name]
    added = {".gitignore", "PKG-INFO", "pyproject.toml"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
    assert {file.name for file in top.iterdir()} == {*wanted, *added}
    build(top, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert contents(again) == contents(wheel)
    assert metadata(again).as_string() == metadata(wheel).as_string()


def test_the_metadata_is_true(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("samovar", samovar.__version__)
    licenses = found.get_all("License-File", [])
    notices = {f"src/samovar/builtin/{model}/NOTICE" for model in BUILTIN_MODELS}
    assert {"LICENSE", "src/samovar/lab/data/NOTICE"} | notices <= set(licenses)
    always = [one for one in found.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert any(one.startswith("uvicorn") for one in always), "a plain install can serve"


def test_the_description_has_no_dead_links(wheel: Path) -> None:
    """On a package index nothing lies beside the README: every link must be absolute."""
    description = metadata(wheel).get_payload()
    assert isinstance(description, str)
    assert description.lstrip().startswith("# Samovar")
    targets = [one or other for one, other in LINK.findall(description)]
    assert [target for target in targets if not target.startswith("https://")] == []


def test_an_installed_samovar_generates_and_serves(installed: Path, tmp_path: Path) -> None:
    file = run([installed / "python", "-c", "import samovar; print(samovar.__file__)"], cwd=tmp_path).stdout.strip()
    assert Path(file).is_relative_to(installed.parent)
    assert run([installed / "samovar", "--version"], cwd=tmp_path).stdout == f"samovar {samovar.__version__}\n"
    check_generate(installed, tmp_path)
    check_serve(installed, tmp_path)


@pytest.mark.slow
def test_pip_install_into_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With all dependencies from the package index; torch first, since its newest build brings gigabytes of CUDA."""
    bin_folder, outside = make_environment(tmp_path / "environment"), tmp_path / "outside"
    outside.mkdir()
    torch = re.findall(r"^torch==.*", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    pip(bin_folder, *torch)
    pip(bin_folder, wheel)
    run([sys.executable, "-m", "pip", "--python", bin_folder / "python", "check"])
    check_generate(bin_folder, outside)
    check_serve(bin_folder, outside)


def check_generate(bin_folder: Path, folder: Path) -> None:
    run([bin_folder / "samovar", "generate", PROMPT, "--device", "cpu", "--steps", 4, "-o", "image.png"], cwd=folder)
    check_image(Image.open(folder / "image.png"))


def check_serve(bin_folder: Path, folder: Path) -> None:
    """Started, asked once, interrupted."""
    command = [bin_folder / "samovar", "serve", "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            (address,) = re.findall(r"http://[\d.]+:\d+", server.stdout.readline())
            assert ask(f"{address}/health")["status"] == "ok"
            reply = ask(f"{address}/v1/images/generations", {"prompt": PROMPT, "num_inference_steps": 4})
            check_image(Image.open(io.BytesIO(base64.b64decode(reply["data"][0]["b64_json"]))))
            server.send_signal(signal.SIGINT)
            assert server.wait(60) in (0, 130)
        finally:
            server.kill()


def ask(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def check_image(image: Image.Image) -> None:
    assert image.size == (128, 128)
    assert len(image.convert("RGB").getcolors(128 * 128) or []) > 100, "more than a blank square"
