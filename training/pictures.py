"""The training pictures on disk, read without an image library.

One `.npz` holds uint8 pictures in xz-compressed chunks, so that the file is about as small as
lossless WebP while a machine with nothing but numpy can read it, one thread a chunk.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

CHUNK = 128
PICTURES = "pictures.npz"
META = "meta.json"


@dataclass(frozen=True)
class Row:
    """What one picture shows: the emoji's name, its style word, its group and its keywords."""

    name: str
    style: str
    group: str
    tags: tuple[str, ...]
    hexcode: str


@dataclass(frozen=True)
class Dataset:
    """Pictures (N, height, width, 3) as uint8, a row for each, and where they came from."""

    pictures: np.ndarray
    rows: tuple[Row, ...]
    sources: dict[str, dict[str, object]]

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.style for row in self.rows))


def fingerprint(pictures: np.ndarray) -> str:
    """A short hash of every pixel: two builds with the same one hold the same pictures."""
    return hashlib.sha256(np.ascontiguousarray(pictures).tobytes()).hexdigest()[:16]


def save(folder: Path, dataset: Dataset) -> None:
    """Write the two files of a data folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = np.ascontiguousarray(dataset.pictures)
    parts = [pictures[i : i + CHUNK].tobytes() for i in range(0, len(pictures), CHUNK)]
    with ThreadPoolExecutor() as pool:
        packed = list(pool.map(lambda part: lzma.compress(part, preset=6), parts))
    chunks = {f"chunk_{i:04d}": np.frombuffer(p, np.uint8) for i, p in enumerate(packed)}
    np.savez(folder / PICTURES, shape=np.array(pictures.shape), **chunks)
    meta = {
        "fingerprint": fingerprint(pictures),
        "sources": dataset.sources,
        "rows": [asdict(row) for row in dataset.rows],
    }
    (folder / META).write_text(json.dumps(meta, separators=(",", ":")) + "\n")


def load(folder: Path) -> Dataset:
    """Read a data folder and check that its pictures are the ones its description speaks of."""
    for name in (PICTURES, META):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no {name} in {folder}: build it with `python -m training.dataset --out {folder}`")
    meta = json.loads((folder / META).read_text())
    with np.load(folder / PICTURES) as archive:
        shape = tuple(int(n) for n in archive["shape"])
        blobs = [archive[name].tobytes() for name in sorted(archive.files) if name != "shape"]
    with ThreadPoolExecutor() as pool:
        raw = b"".join(pool.map(lzma.decompress, blobs))
    pictures = np.frombuffer(raw, np.uint8).reshape(shape)
    rows = tuple(Row(**{**row, "tags": tuple(row["tags"])}) for row in meta["rows"])
    if len(rows) != len(pictures) or fingerprint(pictures) != meta["fingerprint"]:
        raise ValueError(
            f"{folder} holds {len(pictures)} pictures with fingerprint {fingerprint(pictures)}, "
            f"but {META} describes {len(rows)} with {meta['fingerprint']}: build the folder again"
        )
    return Dataset(pictures, rows, meta["sources"])
