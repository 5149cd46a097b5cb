"""What is written can be read again, and is what it was."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samovar.core.errors import SettingError
from samovar.media import (
    SUFFIXES,
    Audio,
    Video,
    check_suffix,
    encode,
    numbered,
    read_audio,
    read_image,
    read_video,
    save,
    usual_suffix,
)

RATE = 16_000


def tone(channels: int = 2, seconds: float = 0.5) -> Audio:
    times = np.arange(round(RATE * seconds)) / RATE
    waves = [0.5 * np.sin(2 * np.pi * 440 * (channel + 1) * times) for channel in range(channels)]
    return Audio(np.stack(waves).astype(np.float32), RATE)


def film(width: int = 48, height: int = 32, audio: Audio | None = None) -> Video:
    """Each frame has a shade of its own, and another at its left."""
    frames = np.stack([np.full((height, width, 3), 20 + 20 * number, np.uint8) for number in range(9)])
    frames[:, :, : width // 2] //= 2
    return Video(frames, 18.0, audio)


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".gif"])
def test_a_video_is_read_back_as_it_was(suffix: str, tmp_path: Path) -> None:
    file = film().save(tmp_path / f"film{suffix}")
    again = read_video(file)
    assert again.frames.shape == (9, 32, 48, 3)
    assert np.abs(again.frames.astype(int) - film().frames).mean() < 3
    assert again.seconds == pytest.approx(0.5)


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".ogg", ".opus"])
def test_the_same_output_is_the_same_file(suffix: str) -> None:
    """Whatever is in memory, and whatever else is encoded."""
    rows, columns = np.mgrid[:64, :64]
    ball = [200 * (np.hypot(columns - 10 - 2 * number, rows - 30) < 9) + 20 for number in range(17)]
    frames = [
        np.stack([each, (columns + 2 * number) % 64 * 3, rows * columns // 16], -1) for number, each in enumerate(ball)
    ]
    output = Video(np.stack(frames).astype(np.uint8), 12.0, tone()) if suffix in (".mp4", ".webm") else tone()
    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(lambda _: encode(output, suffix), range(24 if suffix == ".mp4" else 3)))) == 1


def test_sides_may_be_odd(tmp_path: Path) -> None:
    again = read_video(film(width=47, height=31).save(tmp_path / "film.mp4"))
    assert (again.width, again.height) == (47, 31)


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_a_video_keeps_its_sound(suffix: str, tmp_path: Path) -> None:
    file = film(audio=tone()).save(tmp_path / f"film{suffix}")
    sound = read_audio(file)
    assert len(read_video(file)) == 9
    assert len(sound.samples) == 2
    assert sound.seconds == pytest.approx(0.5, abs=0.1)
    spectrum = np.abs(np.fft.rfft(sound.samples[0]))
    assert np.argmax(spectrum) * sound.rate / sound.samples.shape[1] == pytest.approx(440, abs=5)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("suffix", [".wav", ".flac", ".mp3", ".ogg"])
def test_a_sound_is_read_back_as_it_was(suffix: str, channels: int, tmp_path: Path) -> None:
    audio = tone(channels)
    again = read_audio(audio.save(tmp_path / f"tone{suffix}"))
    assert len(again.samples) == channels
    assert again.seconds == pytest.approx(0.5, abs=0.1)
    if suffix in (".wav", ".flac"):  # The others lose something.
        assert np.abs(again.samples - audio.samples).max() < 1e-4


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_an_image_is_written_as_its_suffix_says(suffix: str, tmp_path: Path) -> None:
    file = save(Image.new("RGBA", (8, 6), (200, 100, 50, 255)), tmp_path / f"cat{suffix}")
    with Image.open(file) as image:
        assert image.format == {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}[suffix]
    assert read_image(file).size == (8, 6)


def test_a_suffix_that_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for output, name, expected in (
        (film(), "film.png", "a video must end in .mp4, .webm, .gif"),
        (film(), "film", "a video must end in"),
        (tone(), "tone.mp4", "a sound must end in .wav"),
        (Image.new("RGB", (4, 4)), "cat.wav", "an image must end in .png"),
    ):
        with pytest.raises(SettingError, match=expected) as refused:
            save(output, tmp_path / name)
        assert refused.value.param == "output"
    assert list(tmp_path.iterdir()) == []


def test_without_pyav_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(SettingError, match=r"pip install av.* saved as \.gif"):
        check_suffix("film.mp4", "video")
    (tmp_path / "film.mp4").write_bytes(b"\0" * 100)
    with pytest.raises(SettingError, match=r"pip install av"):
        read_video(tmp_path / "film.mp4")
    assert [usual_suffix(kind) for kind in SUFFIXES] == [".png", ".gif", ".wav"]
    assert len(read_video(film().save(tmp_path / "film.gif"))) == 9
    assert tone().save(tmp_path / "tone.wav").is_file()
    with pytest.raises(SettingError, match="no sound can be read"):
        read_audio(tmp_path / "tone.wav")


def test_several_files_get_numbers() -> None:
    assert numbered("a/cat.png", 1) == [Path("a/cat.png")]
    assert numbered("a/cat.png", 2) == [Path("a/cat-1.png"), Path("a/cat-2.png")]


@pytest.mark.parametrize("suffix", [".opus", ".aac"])
def test_sound_keeps_its_length_in_other_containers(suffix: str, tmp_path: Path) -> None:
    tone = Audio(np.sin(np.arange(8000) / 10, dtype=np.float32)[None], 16_000)
    assert read_audio(save(tone, tmp_path / f"a{suffix}")).seconds == pytest.approx(0.5, abs=0.1)


def test_bare_samples_are_those_of_a_wave_file(tmp_path: Path) -> None:
    tone = Audio(np.linspace(-1, 1, 20, dtype=np.float32).reshape(2, 10), 8000)
    levels = save(tone, tmp_path / "a.pcm").read_bytes()
    assert len(levels) == 40
    assert (save(tone, tmp_path / "a.wav").read_bytes()).endswith(levels)


def test_a_sound_that_is_too_short_for_a_format_is_no_empty_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"is too short for .mp3. Save it as .wav"):
        save(Audio(np.zeros((1, 2), np.float32), 8), tmp_path / "a.mp3")
    assert not (tmp_path / "a.mp3").exists()
