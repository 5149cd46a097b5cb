"""Gathers the emoji pictures and their words from their npm packages.

    python -m training.dataset --out data

Fetches each pinned package once with `npm pack`, renders every wanted emoji in every style on
white (needs `npm`, Pillow and `resvg_py`), checks the counts and the licence notices, and writes
the pictures with a row of words for each. The same packages give the same pictures.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import unicodedata
from collections import Counter
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np

from training.pictures import Dataset, Row, fingerprint, save

SIZE = 128
MARGIN = 6
LEVELS = 127  # seven bits a channel: no eye sees it, and the file is a quarter smaller
NOTICES = Path(__file__).parent / "notices"


@dataclass(frozen=True)
class Source:
    """One npm package, who drew it, under which licence, and how many pictures it should give."""

    package: str
    version: str
    licence: str
    author: str
    notice: str
    expected: int

    @property
    def archive(self) -> str:
        return f"{self.package.lstrip('@').replace('/', '-')}-{self.version}.tgz"


STYLES = {
    "noto": Source("@iconify-json/noto", "1.2.9", "Apache-2.0", "Google (Noto Emoji)", "noto-emoji.txt", 1369),
    "3d": Source(
        "@lobehub/fluent-emoji-3d",
        "1.1.0",
        "MIT",
        "Microsoft (Fluent Emoji), packaged by LobeHub",
        "fluent-emoji.txt",
        1344,
    ),
    "flat": Source(
        "@iconify-json/fluent-emoji-flat",
        "1.2.6",
        "MIT",
        "Microsoft (Fluent Emoji)",
        "fluent-emoji.txt",
        1349,
    ),
}
WORDS = Source("emojibase-data", "17.0.0", "MIT", "Miles Johnson", "emojibase.txt", 0)

# emojibase numbers; flags (9) and components (2) are never taken
GROUPS = {
    0: "smiley", 1: "people", 3: "animal", 4: "food",
    5: "travel", 6: "activity", 7: "object", 8: "symbol",
}  # fmt: skip
# family, transport-sign, zodiac, av-symbol, gender, keycap, alphanum: signs and near-duplicates
SKIPPED_SUBGROUPS = {30, 83, 87, 88, 89, 94, 95}
# a gender or a direction joined on, and the half-hour clocks: near-duplicates too
SKIPPED_SEQUENCES = ("-200D-2640", "-200D-2642", "-200D-27A1")

Drawing = bytes | tuple[str, float, float, float, float]


def fetch(source: Source, packages: Path) -> Path:
    """The package's archive in `packages`, fetched by npm when it is not there yet."""
    archive = packages / source.archive
    if not archive.is_file():
        packages.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
        subprocess.run(command, cwd=packages, check=True, stdout=subprocess.DEVNULL)
    if not archive.is_file():
        raise FileNotFoundError(
            f"`npm pack {source.package}@{source.version}` left no {archive.name} in {packages}: "
            "fetch it by hand and put it there"
        )
    return archive


def read(archive: Path, name: str) -> bytes:
    """One file out of a package archive."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"package/{name}")
        if member is None:
            raise FileNotFoundError(f"{archive} holds no file package/{name}")
        return member.read()


def plain(text: str) -> str:
    """Lower-case words in ASCII, with no punctuation: 'Rock n’ roll!' -> 'rock n roll'."""
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    text = re.sub(r"[\"!():,.]", " ", text).replace("&", " and ").replace("'", "")
    return re.sub(r"\s+", " ", text).strip().lower()


def slug(label: str) -> str:
    """The icon name an iconify set would give a label: 'Mrs. Claus' -> 'mrs-claus'."""
    text = unicodedata.normalize("NFKD", label).encode("ascii", "ignore").decode().lower()
    text = re.sub(r"['!\"().,:]", "", text.replace("&", "and"))
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def wanted(emoji: dict[str, Any]) -> bool:
    """Whether this emoji is taken. Skin tones sit inside others and are never seen here."""
    return (
        emoji.get("group") in GROUPS
        and emoji.get("subgroup") not in SKIPPED_SUBGROUPS
        and not any(part in emoji["hexcode"].upper() for part in SKIPPED_SEQUENCES)
        and "-thirty" not in emoji["label"]
    )


def hex_names(emoji: dict[str, Any]) -> tuple[str, str, str]:
    """The ways packages spell a code point sequence: with and without the variation selector."""
    code = emoji["hexcode"].lower()
    return code, code.replace("-fe0f", ""), code + "-fe0f"


class IconSet:
    """An iconify package: one JSON of SVG bodies, found by code point, name or alias."""

    def __init__(self, archive: Path) -> None:
        self.icons = json.loads(read(archive, "icons.json"))
        self.chars = json.loads(read(archive, "chars.json"))
        self.undashed = {name.replace("-", ""): name for name in self.icons["icons"]}

    def _name(self, emoji: dict[str, Any]) -> str | None:
        bodies, aliases = self.icons["icons"], self.icons.get("aliases", {})
        name = next((self.chars[h] for h in hex_names(emoji) if h in self.chars), None)
        label = slug(emoji["label"])
        for candidate in () if name else (label, label.replace("-s-", "s-")):
            if candidate in bodies or candidate in aliases:
                name = candidate
            else:
                name = self.undashed.get(candidate.replace("-", ""))
            if name:
                break
        if name in aliases:
            name = aliases[name]["parent"]
        return name if name in bodies else None

    def drawing(self, emoji: dict[str, Any]) -> Drawing | None:
        name = self._name(emoji)
        if name is None:
            return None
        icon, default = self.icons["icons"][name], self.icons
        width = icon.get("width", default.get("width", 16))
        height = icon.get("height", default.get("height", 16))
        return icon["body"], icon.get("left", 0), icon.get("top", 0), width, height


class FileSet:
    """A package of picture files named by code point."""

    def __init__(self, archive: Path) -> None:
        self.files: dict[str, bytes] = {}
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member) if "/assets/" in member.name else None
                if content is not None:
                    self.files[Path(member.name).stem.lower()] = content.read()

    def drawing(self, emoji: dict[str, Any]) -> Drawing | None:
        return next((self.files[h] for h in hex_names(emoji) if h in self.files), None)


def render(drawing: Drawing) -> np.ndarray | None:
    """The drawing cut to its ink and centred on white, or None when it has no ink."""
    from PIL import Image

    if isinstance(drawing, bytes):
        data = drawing
    else:
        import resvg_py

        body, left, top, width, height = drawing
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}" width="{SIZE * 2}" height="{SIZE * 2}">'
            f"{body}</svg>"
        )
        data = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIZE * 2, height=SIZE * 2))
    rgba = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    ys, xs = np.where(rgba[:, :, 3] > 8)
    if not len(ys):
        return None
    ink = rgba[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1].astype(np.float32) / 255
    on_white = ink[..., :3] * ink[..., 3:] + (1 - ink[..., 3:])
    image = Image.fromarray((on_white * 255).round().clip(0, 255).astype(np.uint8))
    scale = (SIZE - 2 * MARGIN) / max(image.size)
    width, height = (max(1, round(side * scale)) for side in image.size)
    sheet = Image.new("RGB", (SIZE, SIZE), (255, 255, 255))
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    sheet.paste(small, ((SIZE - width) // 2, (SIZE - height) // 2))
    levels = np.round(np.asarray(sheet, np.float32) * (LEVELS / 255))
    return np.round(levels * (255 / LEVELS)).astype(np.uint8)


def gather(archives: dict[str, Path], words: Path) -> tuple[list[Row], list[Drawing]]:
    """A row and a drawing for each wanted emoji in each style that has it, emoji by emoji."""
    emojis = [e for e in json.loads(read(words, "en/data.json")) if wanted(e)]
    sets: dict[str, IconSet | FileSet] = {
        style: (IconSet if "iconify" in STYLES[style].package else FileSet)(archive)
        for style, archive in archives.items()
    }
    rows, drawings = [], []
    for emoji in emojis:
        tags = tuple(t for t in map(plain, emoji.get("tags", [])) if t)
        for style, icons in sets.items():
            drawing = icons.drawing(emoji)
            if drawing is not None:
                name, group = plain(emoji["label"]), GROUPS[emoji["group"]]
                rows.append(Row(name, style, group, tags, emoji["hexcode"]))
                drawings.append(drawing)
    return rows, drawings


def check_counts(rows: list[Row]) -> None:
    """Refuse a build that lost or gained pictures: a package or a rule has changed."""
    counts = Counter(row.style for row in rows)
    for style, source in STYLES.items():
        if counts[style] != source.expected:
            raise ValueError(
                f"style {style!r} gave {counts[style]} pictures, expected {source.expected} from "
                f"{source.package}@{source.version}: if the change is meant, change STYLES"
            )


def check_notices(words: Path) -> None:
    """The licence texts we ship must be there, and be the package's own where it has one."""
    for source in (*STYLES.values(), WORDS):
        if not (NOTICES / source.notice).is_file():
            raise FileNotFoundError(
                f"{source.package} has no licence text {source.notice!r} in "
                f"{NOTICES}: add it, it is shipped with the model"
            )
    if read(words, "LICENSE") != (NOTICES / WORDS.notice).read_bytes():
        raise ValueError(f"{WORDS.package} changed its LICENSE: copy it to {WORDS.notice}")


def build(out: Path, packages: Path) -> Dataset:
    """Fetch, render, check and write the data folder."""
    archives = {style: fetch(source, packages) for style, source in STYLES.items()}
    words = fetch(WORDS, packages)
    check_notices(words)
    rows, drawings = gather(archives, words)
    with Pool() as pool:
        rendered = pool.map(render, drawings, chunksize=16)
    kept = [(row, image) for row, image in zip(rows, rendered, strict=True) if image is not None]
    check_counts([row for row, _ in kept])
    sources: dict[str, dict[str, object]] = {
        key: {
            "package": source.package, "version": source.version, "licence": source.licence,
            "author": source.author, "notice": source.notice, "pictures": source.expected,
        }
        for key, source in {**STYLES, "captions": WORDS}.items()
    }  # fmt: skip
    dataset = Dataset(np.stack([i for _, i in kept]), tuple(r for r, _ in kept), sources)
    save(out, dataset)
    return dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data"), help="the data folder to write")
    parser.add_argument("--packages", type=Path, help="npm archives (default: OUT/packages)")
    args = parser.parse_args()
    dataset = build(args.out, args.packages or args.out / "packages")
    counts = Counter(row.style for row in dataset.rows)
    print(f"{len(dataset.rows)} pictures {dict(counts)}, {fingerprint(dataset.pictures)}")


if __name__ == "__main__":
    main()
