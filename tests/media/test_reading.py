"""Images are read upright and at eight bits; what cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samovar.core.errors import SettingError
from samovar.media import Audio, Video, read_audio, read_image, read_media, read_video, upright, upright_size

ORIENTATION = 0x0112


def photo(tmp_path: Path) -> Path:
    """Stored lying, red at its right; to be shown upright, a quarter turn clockwise."""
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (0, 0, 20, 20))
    exif = image.getexif()
    exif[ORIENTATION] = 6
    image.save(tmp_path / "phone.jpg", exif=exif)
    return tmp_path / "phone.jpg"


def test_a_photo_is_turned_as_its_camera_noted(tmp_path: Path) -> None:
    image = read_image(photo(tmp_path))
    assert image.size == (20, 40)
    assert image.getpixel((10, 5))[2] > 200, "blue is above"
    assert image.getpixel((10, 35))[0] > 200
    with Image.open(tmp_path / "phone.jpg") as lying:
        assert (lying.size, upright_size(lying)) == ((40, 20), (20, 40))


@pytest.mark.parametrize(("dtype", "name"), [(np.uint16, "ramp.png"), (np.int32, "ramp.tiff")])
def test_sixteen_bits_become_eight_and_not_white(dtype: type, name: str, tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(dtype)
    Image.fromarray(ramp).save(tmp_path / name)
    levels = np.asarray(read_image(tmp_path / name).convert("RGB"))
    assert levels.mean() == pytest.approx(127.5, abs=0.6)
    assert len(np.unique(levels)) == 256
    assert (levels == 255).mean() < 0.01


def test_what_is_upright_stays_as_it_is() -> None:
    image = Image.new("RGBA", (5, 4), (1, 2, 3, 4))
    assert upright(image).getpixel((0, 0)) == (1, 2, 3, 4)


def test_an_animation_is_a_video(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue", "white")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=[100, 100, 100, 200])
    video = read_video(tmp_path / "a.gif")
    assert (len(video), video.fps) == (4, 8.0)


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    Audio(np.zeros((1, 100), np.float32), 100).save(tmp_path / "a.wav")
    Video(np.zeros((2, 4, 4, 3), np.uint8), 2.0).save(tmp_path / "a.gif")
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    kinds = [type(read_media(tmp_path / f"a.{suffix}", "x")) for suffix in ("wav", "gif", "png")]
    assert kinds == [Audio, Video, Image.Image]


@pytest.mark.parametrize(("read", "name"), [(read_image, "a.png"), (read_video, "a.mp4"), (read_video, "a.gif"),
                                            (read_audio, "a.wav"), (read_audio, "a.flac")])  # fmt: skip
def test_what_cannot_be_read_is_named(read: object, name: str, tmp_path: Path) -> None:
    for make in (lambda file: None, lambda file: file.write_bytes(b"not this")):
        make(tmp_path / name)
        with pytest.raises(SettingError, match=f"x '.*{name}'") as refused:
            read(tmp_path / name, "x")  # type: ignore[operator]
        assert refused.value.param == "x"


def test_a_file_without_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    """It can be read, and is not said to be broken."""
    Video(np.zeros((4, 16, 16, 3), np.uint8), 8.0).save(tmp_path / "silent.mp4")
    with pytest.raises(SettingError) as refused:
        read_audio(tmp_path / "silent.mp4")
    assert str(refused.value).endswith("silent.mp4' has no audio in it.")
    Audio(np.zeros((1, 800), np.float32), 8000).save(tmp_path / "sound.flac")
    with pytest.raises(SettingError) as refused:
        read_video(tmp_path / "sound.flac")
    assert str(refused.value).endswith("sound.flac' has no video in it.")
    assert "cannot be read" not in str(refused.value)
