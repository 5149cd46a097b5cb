"""Writes images, videos and sounds as their suffix says; PyAV encodes what Python alone cannot."""

from __future__ import annotations

import contextlib
import io
import itertools
import wave
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from .values import Audio, Video

SUFFIXES = {
    "image": (".png", ".jpg", ".jpeg", ".webp"),
    "video": (".mp4", ".webm", ".gif"),
    "audio": (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aac", ".pcm"),
}
"""What each kind of output can be saved as; the first that can be written is the usual one."""

_CODECS = {
    ".mp4": ("libx264", {"crf": "18"}, "aac"),
    ".webm": ("libvpx-vp9", {"crf": "24", "b:v": "0", "deadline": "good", "cpu-used": "4", "row-mt": "1"}, "libopus"),
    ".flac": ("", {}, "flac"),
    ".mp3": ("", {}, "libmp3lame"),
    ".ogg": ("", {}, "libopus"),
    ".opus": ("", {}, "libopus"),
    ".aac": ("", {}, "aac"),
}  # fmt: skip
"""Of the frames, with its options, and of the sound."""
_CONTAINERS = {".opus": "ogg", ".aac": "adts"}
"""Those that have another name than the suffix."""
_REPEATABLE = {"mbtree": "0"}
"""Where a row is not whole eights of macroblocks, x264 weighs them by memory that it has not written."""
_MUXING = {"fflags": "+bitexact"}
"""Without random numbers, or the same output would be another file each time."""
_WITHOUT = "Without it, videos can be saved as .gif and sounds as .wav."
_FULL_SCALE = 2**15 - 1


def kind_of(output: Any) -> str:
    return "video" if isinstance(output, Video) else "audio" if isinstance(output, Audio) else "image"


def check_suffix(file: str | Path, kind: str | None = None) -> str:
    """The suffix of a file, if something of this kind, or of any, can be saved in it."""
    suffix = Path(file).suffix.lower()
    known = SUFFIXES[kind] if kind else tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    if suffix not in known:
        what = {"image": "an image", "video": "a video", "audio": "a sound", None: "an output"}[kind]
        message = f"output={str(file)!r}: the file of {what} must end in {', '.join(known)}."
        raise SettingError(message, param="output")
    if suffix in _CODECS:
        load_av(f"To write {suffix} files", _WITHOUT)
    return suffix


def usual_suffix(kind: str) -> str:
    """What an output of this kind is saved as unless somebody says: the first suffix that can be written here."""
    for suffix in SUFFIXES[kind]:
        with contextlib.suppress(SettingError):
            return check_suffix(f"out{suffix}", kind)
    raise AssertionError("each kind has a suffix that needs no other package")


def load_av(purpose: str, instead: str) -> Any:
    """PyAV, which is in an extra."""
    try:
        import av
    except ImportError as error:
        message = f"{purpose}, PyAV is needed: pip install av. {instead}"
        raise SettingError(message, param="output") from error
    return av


def numbered(file: str | Path, count: int) -> list[Path]:
    """The files for some outputs: cat.png, or cat-1.png, cat-2.png ..."""
    path = Path(file).expanduser()
    return [path] if count == 1 else [path.with_stem(f"{path.stem}-{number}") for number in range(1, count + 1)]


def save(output: Any, file: str | Path) -> Path:
    """Write an image, a video or a sound. Nothing is written if it cannot be encoded."""
    path = Path(file).expanduser()
    content = encode(output, check_suffix(path, kind_of(output)))
    path.write_bytes(content)
    return path


def encode(output: Any, suffix: str) -> bytes:
    """The content of a file with this suffix."""
    content = io.BytesIO()
    if isinstance(output, Audio) and suffix == ".wav":
        _write_wav(output, content)
    elif isinstance(output, Audio) and suffix == ".pcm":
        content.write(_levels(output))
    elif isinstance(output, Video) and suffix == ".gif":
        _write_gif(output, content)
    elif isinstance(output, (Audio, Video)):
        _write_container(output, content, suffix)
    else:
        image = output if suffix in (".png", ".webp") else output.convert("RGB")
        image.save(content, {".jpg": "JPEG"}.get(suffix, suffix[1:].upper()))
    if not content.tell():
        raise SettingError(f"{output!r} is too short for {suffix}. Save it as .wav.", param="output")
    return content.getvalue()


def _write_wav(audio: Audio, content: io.BytesIO) -> None:
    with wave.open(content, "wb") as file:
        file.setnchannels(len(audio.samples))
        file.setsampwidth(2)
        file.setframerate(audio.rate)
        file.writeframes(_levels(audio))


def _levels(audio: Audio) -> bytes:
    """Of 16 bits, with those of all channels in turn."""
    return (audio.samples.clip(-1, 1) * _FULL_SCALE).round().astype("<i2").T.tobytes()


def _write_gif(video: Video, content: io.BytesIO) -> None:
    """A GIF counts in hundredths of a second: frames differ by one, so that the whole is as long as it should be."""
    ends = [round(100 * number / video.fps) for number in range(len(video) + 1)]
    durations = [10 * max(1, end - start) for start, end in itertools.pairwise(ends)]
    first, *rest = video.images
    first.save(content, "GIF", save_all=True, append_images=rest, duration=durations, loop=0)


def _write_container(output: Audio | Video, content: io.BytesIO, suffix: str) -> None:
    av = load_av(f"To write {suffix} files", _WITHOUT)
    codec, options, sound_codec = _CODECS[suffix]
    with av.open(content, "w", format=_CONTAINERS.get(suffix, suffix[1:]), options=_MUXING) as container:
        audio = output if isinstance(output, Audio) else output.audio
        pictures = None
        if isinstance(output, Video):
            options = options | (_REPEATABLE if suffix == ".mp4" and -(-output.width // 16) % 8 else {})
            pictures = container.add_stream(codec, rate=Fraction(output.fps).limit_denominator(1001), options=options)
            pictures.width, pictures.height = output.width, output.height
            # Half the colour resolution, which every player shows, needs even sides.
            pictures.pix_fmt = "yuv444p" if output.width % 2 or output.height % 2 else "yuv420p"
        sound = None if audio is None else _sound_stream(av, container, sound_codec, audio)
        if pictures is not None and isinstance(output, Video):
            for frame in output.frames:
                container.mux(pictures.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(pictures.encode())
        if sound is not None and audio is not None:
            container.mux(sound.encode(_sound_frame(av, audio)))
            container.mux(sound.encode())


def _sound_stream(av: Any, container: Any, codec: str, audio: Audio) -> Any:
    """At the sound's own rate, or at the next one above it that the codec knows."""
    rates = av.Codec(codec, "w").audio_rates or [audio.rate]
    rate = min((each for each in rates if each >= audio.rate), default=max(rates))
    return container.add_stream(codec, rate=rate, layout="mono" if len(audio.samples) == 1 else "stereo")


def _sound_frame(av: Any, audio: Audio) -> Any:
    import numpy as np

    samples = audio.samples[:2] if len(audio.samples) <= 2 else audio.samples.mean(0, keepdims=True).repeat(2, 0)
    planes = np.ascontiguousarray(samples.clip(-1, 1), dtype=np.float32)
    frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="mono" if len(planes) == 1 else "stereo")
    frame.sample_rate = audio.rate
    return frame
