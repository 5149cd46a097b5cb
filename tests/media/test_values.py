"""Videos and sounds are arrays with a rate; anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest

from samovar.core.errors import SettingError
from samovar.media import Audio, Video

FRAMES = np.zeros((8, 6, 4, 3), np.uint8)


def test_a_video_knows_its_size_and_duration() -> None:
    video = Video(FRAMES, 4.0)
    assert (video.width, video.height, len(video), video.seconds) == (4, 6, 8, 2.0)
    assert [image.size for image in video.images] == [(4, 6)] * 8
    assert repr(video) == "<Video: 4x6, 8 frames, 4 fps>"


def test_a_sound_knows_its_duration() -> None:
    audio = Audio(np.zeros((2, 800), np.float32), 400)
    assert audio.seconds == 2.0
    assert repr(audio) == "<Audio: 2 channels, 2.00 s, 400 Hz>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Video(FRAMES[0], 4.0), "expected uint8 \\(frames, height, width, 3\\)"),
        (lambda: Video(FRAMES.astype(float), 4.0), "frames are float64"),
        (lambda: Video(FRAMES, 0), "fps must be a number above 0, not 0"),
        (lambda: Video(FRAMES, float("nan")), "fps must be a number above 0, not nan"),
        (lambda: Audio(np.zeros(4, np.float32), 400), "expected \\(channels, samples\\)"),
        (lambda: Audio(np.zeros((1, 0), np.float32), 400), "expected \\(channels, samples\\)"),
        (lambda: Audio(np.zeros((1, 4), np.float32), 0), "rate must be a number of samples per second, not 0"),
    ],
)
def test_what_is_none_is_refused(make: object, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()  # type: ignore[operator]
