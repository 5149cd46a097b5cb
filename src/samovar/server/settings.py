"""Settings of the server, and the most that a request may ask for."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from ..core.files import check_names, naming, read_mapping
from ..core.settings import (
    FLAG,
    SETTING,
    SIZE,
    TEXT,
    TOLERANCE,
    Kind,
    Settings,
    choice,
    count,
    number,
    parse_bytes,
    read_tolerance,
    setting,
    table,
)  # fmt: skip
from .logs import FORMATS

BYTES_PER_PIXEL = 8
"""Of an image, received or made: four in memory, and as many on its way from or to another process, or encoded."""
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", flags=re.ASCII)
SECONDS = number(0, above=True)._replace(expected="a number of seconds above 0", metavar="S")


def _texts(expected: str, is_fit: Any, metavar: str = "NAME") -> Kind:
    """Several texts, or one, which a command line has one option each for."""

    def read(value: Any) -> tuple[str, ...]:
        texts = (value,) if isinstance(value, str) else tuple(value)
        for text in texts:
            if not isinstance(text, str) or not is_fit(text):
                raise ValueError(f"{text!r} is not one.")
        return texts

    return Kind(f"{expected}, or several", read, metavar=metavar)


def _read_key(key: Any) -> str:
    """A key that a client can send. It is not shown."""
    if isinstance(key, str) and key.isascii() and key.isprintable() and key and key == key.strip():
        return key
    message = "api_key must be printable ASCII without spaces around it, because it is sent in a header."
    raise SettingError(f"{message} Leave it out for an open server.", param="api_key")


_ORIGINS = _texts(
    "an origin such as https://example.com, without a path (all sites cannot be allowed)",
    lambda origin: origin != "*" and "://" in origin and origin.count("/") == 2,
    "URL",
)
_HOSTS = _texts("a host name such as example.com, without a port", _HOST.fullmatch)
_CLIENT_NAMES = _texts(
    "a name for clients, such as 'flux', of up to 200 characters",
    lambda name: 0 < len(name) <= 200 and name.isprintable() and name == name.strip(),
)


@dataclass(frozen=True)
class Limits(Settings, param="limits"):
    """The most that one request may ask for, checked before anything is allocated."""

    max_pixels: int = setting(2048 * 2048, count(1), "Pixels of one image, made or sent.")
    max_steps: int = setting(200, count(1), "Denoising steps.")
    max_images: int = setting(10, count(1), "Images of one request.")
    max_frames: int = setting(513, count(1), "Frames of one video.")
    max_seconds: int = setting(300, count(1), "Seconds of one video or sound.")
    max_video_pixels: int = setting(
        2**27, count(1), "Pixels of one video, in all its frames. 145 frames of 1280x720 fit."
    )
    max_prompt_characters: int = setting(32_000, count(1), "Characters of a prompt.", option=None)
    max_json_bytes: int = setting(
        2**20, count(1), "Of a JSON body: the longest prompt fits, even with every character escaped.", option=None
    )
    max_upload_bytes: int = setting(32 * 2**20, count(1), "Of a form with images.", option=None)
    max_body_s: int = setting(
        3, count(1), "Seconds of processor time for reading a body and decoding its image.", option=None
    )


@dataclass(frozen=True)
class ServerConfig(Settings, param="server"):
    """All settings of the server."""

    host: str = setting(
        "127.0.0.1", TEXT, "Where to listen: this machine only, or 0.0.0.0 for others too. Then set `api_key`.",
    )  # fmt: skip
    port: int = setting(8091, count(0, 65535), "The port; 0 takes a free one.")
    api_key: str | None = setting(
        None, Kind("a key", _read_key, metavar="KEY"),
        "The key that clients must send; better set SAMOVAR_API_KEY. They send it as `Authorization: Bearer KEY`. It "
        "is never logged.", repr=False,
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), _ORIGINS, "Another site whose pages may use the server, such as https://example.com.",
        option="--cors-origin",
    )  # fmt: skip
    fetch_origins: tuple[str, ...] = setting(
        (), _ORIGINS,
        "A site from which images are fetched that a request names by URL. Such as https://images.example.com; by "
        "default none. A host name must lead to public addresses.", option="--fetch-origin",
    )  # fmt: skip
    allowed_hosts: tuple[str, ...] = setting(
        (), _HOSTS, "Another host name of the server, such as example.com behind a proxy.",
        option="--allowed-host",
    )  # fmt: skip
    served_model_name: tuple[str, ...] = setting(
        (), _CLIENT_NAMES,
        "A name of the model for clients; by default that of its folder. The first one is in answers.",
    )  # fmt: skip
    is_metrics_open: bool = setting(False, FLAG, "Let /metrics be read without the key.", option="--open-metrics")
    log_format: str = setting("text", choice(FORMATS), "Lines of text, or one JSON object for each.")
    limits: Limits = field(default_factory=Limits)
    max_tolerance: float | None = setting(
        None, TOLERANCE._replace(read=lambda value: read_tolerance(value, "max_tolerance")),
        "The most that a request may let the cache auto lose. By number or by name; by default whatever it asks for.",
    )  # fmt: skip
    request_timeout_s: float = setting(
        30.0, SECONDS, "Seconds that a request may take to arrive, and that a client may read nothing.",
        option="--request-timeout",
    )  # fmt: skip
    shutdown_timeout_s: float = setting(
        30.0, number()._replace(expected="a number of seconds, 0 or more", metavar="S"),
        "Seconds that running requests may take to finish when the server shuts down.",
        option="--shutdown-timeout",
    )  # fmt: skip
    max_connections: int = setting(
        512, count(1),
        "Open connections. When there are more, the one is closed that has been silent for longest, of those whose "
        "request has not come. Fewer where the system allows fewer open files.",
    )  # fmt: skip
    max_memory: str | int | None = setting(
        None, SIZE,
        "Memory of bodies, images and other answers, such as 2GiB. Bodies may take a quarter. By default 1 GiB, or "
        "what the largest allowed request needs. Above it, requests get 503.",
    )  # fmt: skip
    jobs: str | Path | None = setting(
        None, SETTING._replace(metavar="DIR", parse=str),
        "The folder of videos and of the requests for them. It outlives the server; by default one for each model in "
        "~/.local/state/samovar/jobs, or where XDG_STATE_HOME says.",
    )  # fmt: skip
    job_expiry_s: float = setting(
        86_400.0, SECONDS, "Seconds for which a video is kept after it was made.", option="--job-expiry"
    )
    max_job_disk: str | int = setting(
        "10GiB", SIZE, "What all videos that are kept may take, with the requests for them."
    )
    max_jobs: int = setting(
        10_000, count(1), "Videos that are kept. For a new one, failed ones go; else it is refused."
    )

    @classmethod
    def read_over(cls, settings: Mapping[str, Any], file: str | Path | None = None) -> ServerConfig:
        """Settings of the server and its limits by name: the given ones over those under `server` in a file."""
        in_file = {} if file is None else read_mapping(file, "config").get("server") or {}
        if not isinstance(in_file, Mapping):
            raise SettingError(f"In {str(file)!r}: server must hold settings by name, not {in_file!r}.", param="server")
        with naming(file):
            check_names(in_file, [*table(Limits), *table(cls)], "a setting of the server")
            given = {**in_file, **settings}
            limits = Limits(**{name: given.pop(name) for name in table(Limits) if name in given})
            return cls(limits=limits, **given)

    def check(self) -> None:
        if self.memory_bytes < self._least_memory:
            message = f"max_memory={self.max_memory!r} is too little for the largest allowed request, which needs"
            remedy = "Raise it, or lower max_pixels, max_images or max_upload_bytes."
            raise SettingError(f"{message} {self._least_memory:,} bytes. {remedy}", param="max_memory")

    @property
    def memory_bytes(self) -> int:
        """`max_memory` as a number."""
        return parse_bytes(self.max_memory, "max_memory") or max(2**30, self._least_memory)

    @property
    def _least_memory(self) -> int:
        """For one request: its body in three quarters of a quarter, and its images, with one to edit, in the rest."""
        images = BYTES_PER_PIXEL * self.limits.max_pixels * (self.limits.max_images + 1)
        return max(16 * (self.limits.max_upload_bytes + 2**20) // 3, -(-4 * images // 3))

    def jobs_folder(self, model_name: str) -> Path:
        """`jobs`, or the usual one of a model."""
        if self.jobs is not None:
            return Path(self.jobs).expanduser()
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        return state / "samovar" / "jobs" / re.sub(r"[^\w.-]", "_", model_name)

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in _LOCAL_HOSTS or self.host == "::1" or self.host.startswith("127.")

    def known_hosts(self) -> frozenset[str] | None:
        """The hosts a request may name; None for any. On a local server another name may be a page's DNS rebinding."""
        if not self.is_local and not self.allowed_hosts:
            return None
        return frozenset((*_LOCAL_HOSTS, self.host.lower(), *(host.lower() for host in self.allowed_hosts)))
