"""Forms that are nearly right: boundaries, names, encodings, lengths."""

from __future__ import annotations

import io
from random import Random

from PIL import Image

from server.running import RunningServer

from .asking import Watched
from .cases import Fuzz, fuzzed
from .changes import TEXTS, changed_bytes

FIELDS = ["prompt", "size", "n", "seed", "strength", "model", "stream", "output_format", "negative_prompt", "mask",
          "num_inference_steps", "cache", "image[]", "_charset_", "prompt[]", "", "x" * 3000]  # fmt: skip
TYPES = [b"", b"text/plain", b"text/plain; charset=utf-16", b"text/plain; charset=rot13", b"text/plain; charset=\xff",
         b"text/plain; charset=unicode_escape", b"image/png", b"multipart/mixed; boundary=y"]  # fmt: skip
BOUNDARIES = [b"x", b"x" * 70, b"x" * 300, b"", b'"x"', b'"x', b"x y", b"\xff", b"--x", b"x;y=z", b"'()+_,-./:=?"]


def png(random: Random) -> bytes:
    buffer = io.BytesIO()
    Image.new(random.choice(["RGB", "RGBA", "L"]), (16, 16)).save(buffer, "PNG")
    return buffer.getvalue()


def part(random: Random, name: str, content: bytes, is_file: bool) -> bytes:
    quoted = name.encode("utf-8", "surrogatepass").replace(b'"', b"%22")
    disposition = b'Content-Disposition: form-data; name="' + quoted + b'"'
    if is_file:
        file = random.choice([b"a.png", b"", b"../../etc/passwd", b"\xff", b"a\\b", b"a" * 3000, b'a";x="'])
        disposition += b'; filename="' + file + b'"'
    if random.random() < 0.1:
        disposition = random.choice([b"Content-Disposition: form-data", b"Content-Disposition:", b"X: y", b"",
                                     disposition + b"; name=other", disposition.replace(b'"', b""), b"\x00",
                                     disposition + b"; filename*=utf-8''%ff%fe"])  # fmt: skip
    kind = random.choice(TYPES) if random.random() < 0.3 else b""
    lines = [disposition, *([b"Content-Type: " + kind] if kind else [])]
    if random.random() < 0.05:
        lines.append(
            random.choice([b"Content-Transfer-Encoding: base64", b"Content-Length: 5", b" folded", b"a" * 9000])
        )
    return b"\r\n".join([*lines, b"", content])


def form(random: Random) -> tuple[bytes, bytes]:
    """The content type and the body."""
    boundary = b"x" if random.random() < 0.8 else random.choice(BOUNDARIES)
    parts = [part(random, "prompt", b"a cat", False), part(random, "image", png(random), True)]
    for _ in range(random.choice([0, 1, 1, 2, 1200 if random.random() < 0.03 else 3])):
        plain = ["1", "2", "16x16", "0.5", "png", "false", "a dog"]
        text = random.choice(plain if random.random() < 0.6 else TEXTS).encode("utf-8", "surrogatepass")
        text = random.randbytes(9) if random.random() < 0.1 else text
        parts.insert(random.randrange(len(parts) + 1), part(random, random.choice(FIELDS), text, random.random() < 0.1))
    if random.random() < 0.1:
        parts.pop(random.randrange(len(parts)))
    body = b"".join(b"--" + boundary + b"\r\n" + each + b"\r\n" for each in parts)
    body += (
        b"--"
        + boundary
        + random.choice([b"--\r\n"] * 8 + [b"\r\n", b"", b"--", b"--\r\n" * 3, b"--\r\nepilogue" * 200])
    )
    if random.random() < 0.1:
        body = b"preamble\r\n" + body
    kind = b"multipart/form-data; boundary=" + boundary
    if random.random() < 0.05:
        kind = random.choice([b"multipart/form-data", b"multipart/mixed; boundary=x", b"MULTIPART/FORM-DATA;BOUNDARY=x",
                              kind + b"; charset=utf-16", b"multipart/form-data; boundary=y; boundary=x"])  # fmt: skip
    return kind, changed_bytes(random, body) if random.random() < 0.3 else body


@fuzzed("forms", 60)
def test_no_form_is_a_fault_of_the_server(fuzz: Fuzz, editing: RunningServer) -> None:
    watched = Watched(editing)
    with editing.client() as client:
        for random in fuzz.cases():
            kind, body = form(random)
            with fuzz.trying(kind + b"\r\n\r\n" + body, "form"):
                answer = client.post("/v1/images/edits", content=body, headers=[(b"Content-Type", kind)])
                fuzz.ends[watched.answered(answer)] += 1
