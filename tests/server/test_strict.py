"""Bodies that two readers could read in two ways are refused."""

from __future__ import annotations

import pytest

from samovar.server.failures import Refusal
from samovar.server.strict import read_flag, read_number, read_object, read_whole

BAD = {
    "empty": b"",
    "cut off": b'{"prompt": "a',
    "a list": b"[1]",
    "a word": b"null",
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": -Infinity}',
    "overflow": b'{"a": 1e309}',
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "twice": b'{"a": 1, "a": 2}',
    "twice within": b'{"a": {"b": 1, "b": 1}}',
    "deep lists": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "half a character": b'{"a": "\\ud800"}',
    "half a character as a name": b'{"\\udfff": 1}',
    "single quotes": b"{'a': 1}",
    "a comma too many": b'{"a": 1,}',
    "two objects": b"{}{}",
    "a raw line break": b'{"a": "\n"}',
    "a comment": b"{} // no",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_object(body)
    assert refused.value.status == 400
    assert len(refused.value.message) < 400


def test_good_bodies_are_read() -> None:
    body = '{"prompt": "Кот \\u0000 \\ud83d\\ude00", "n": 2, "x": 1.5, "y": null, "z": [{}]}'
    assert read_object(body.encode()) == {"prompt": "Кот \x00 😀", "n": 2, "x": 1.5, "y": None, "z": [{}]}


def test_form_values_are_plain_or_stay_text() -> None:
    assert [read_whole(text) for text in ("7", "-7", "0")] == [7, -7, 0]
    for text in ("07", "+7", "1_000", "\uff17", " 7", "7\n", "7.0", "1e3", "0x7", "", "9" * 20):
        assert read_whole(text) == text
    assert read_number("2.5") == 2.5
    for text in ("nan", "inf", "1e3", "2.", ".5", "1_0.5", ""):
        assert read_number(text) == text
    assert (read_flag("true"), read_flag("false"), read_flag("True"), read_flag("1")) == (True, False, "True", "1")
