"""Reads images, videos and sounds from files: upright, at eight bits, whatever wrote them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import SettingError
from .values import Audio, Video
from .writing import load_av

if TYPE_CHECKING:
    from PIL.Image import Image

_ANIMATED = (".gif", ".webp", ".png", ".apng")
"""What Pillow reads frame by frame."""
_ORIENTATION = 0x0112
_SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac")
_VIDEOS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v", ".gif")


def upright(image: Image) -> Image:
    """An image as viewers show it: turned as its EXIF says, and at eight bits. Pillow clips more to white."""
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):
        turned = turned.convert("I").point(lambda level: level * (255 / 65535)).convert("L")
    return turned


def upright_size(image: Image) -> tuple[int, int]:
    """Width and height of an image as viewers show it."""
    width, height = image.size
    return (height, width) if image.getexif().get(_ORIENTATION) in (5, 6, 7, 8) else (width, height)


def _check_there(file: str | Path, param: str) -> None:
    if not Path(file).is_file():
        why = "is a folder" if Path(file).is_dir() else "is not there"
        raise SettingError(f"{param} {str(file)!r} {why}. Give a file.", param=param)


def read_image(file: str | Path, param: str = "image") -> Image:
    """The image of a file."""
    with _pillow(file, param) as image:
        image.load()
        return upright(image)


@contextlib.contextmanager
def _pillow(file: str | Path, param: str) -> Iterator[Image]:
    """A file that Pillow reads."""
    from PIL import Image

    _check_there(file, param)
    try:
        with Image.open(file) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SettingError(f"{param} {str(file)!r} cannot be read: {error}", param=param) from error


def read_video(file: str | Path, param: str = "video") -> Video:
    """The frames of a file and how fast they are played. An animation with a time for each frame gets their mean."""
    import numpy as np

    if Path(file).suffix.lower() in _ANIMATED:
        from PIL import ImageSequence

        with _pillow(file, param) as image:
            shown = [
                (np.asarray(each.convert("RGB")), each.info.get("duration")) for each in ImageSequence.Iterator(image)
            ]
        seconds = sum(duration or 0 for _, duration in shown) / 1000
        return Video(np.stack([frame for frame, _ in shown]), len(shown) / seconds if seconds else 24.0)
    with _stream(file, "video", param, "Without it, animations in GIF, WebP and PNG can be read.") as (_, stream):
        frames = [frame.to_ndarray(format="rgb24") for frame in stream.container.decode(stream)]
        rate = float(stream.average_rate or stream.base_rate or 24)
    if not frames:
        raise SettingError(f"{param} {str(file)!r} has no frames.", param=param)
    return Video(np.stack(frames), rate)


def read_audio(file: str | Path, param: str = "audio") -> Audio:
    """The sound of a file, or of a video."""
    import numpy as np

    with _stream(file, "audio", param, "Without it, no sound can be read.") as (av, stream):
        resampler = av.AudioResampler(format="fltp", layout=stream.layout.name, rate=stream.rate)
        decoded = [part for frame in stream.container.decode(stream) for part in resampler.resample(frame)]
        parts = [part.to_ndarray() for part in [*decoded, *resampler.resample(None)]]
        rate = int(stream.rate)
    if not parts:
        raise SettingError(f"{param} {str(file)!r} has no samples.", param=param)
    return Audio(np.concatenate(parts, axis=1), rate)


@contextlib.contextmanager
def _stream(file: str | Path, kind: str, param: str, remedy: str) -> Iterator[tuple[Any, Any]]:
    """PyAV, and the first stream of a kind in a file."""
    _check_there(file, param)
    av = load_av(f"To read {str(file)!r}", remedy)
    try:
        with av.open(str(file)) as container:
            streams = getattr(container.streams, kind)
            if streams:
                yield av, streams[0]
                return
    except (OSError, ValueError) as error:  # PyAV's own errors are one of them.
        raise SettingError(f"{param} {str(file)!r} cannot be read as {kind}: {error}", param=param) from error
    raise SettingError(f"{param} {str(file)!r} has no {kind} in it.", param=param)


def read_media(file: str | Path, param: str) -> Any:
    """An image, a video or a sound, by the suffix of the file."""
    suffix = Path(file).suffix.lower()
    read = read_audio if suffix in _SOUNDS else read_video if suffix in _VIDEOS else read_image
    return read(file, param)
