"""How is the server reached, and what may a request ask for? Every setting is checked before anything starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..core.errors import SettingError, nearest
from ..core.files import check_names, naming, read_mapping
from ..core.settings import parse_bytes, read_tolerance
from .logs import FORMATS
from .memory import BYTES_PER_PIXEL

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", flags=re.ASCII)


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for, checked before anything is allocated."""

    max_pixels: int = 2048 * 2048
    """Of one image, made or sent."""
    max_steps: int = 200
    max_images: int = 10
    max_frames: int = 513
    """Of one video."""
    max_seconds: int = 300
    """Of one video or sound."""
    max_video_pixels: int = 2**27
    """Of one video, in all its frames: 145 of 1280x720."""
    max_prompt_characters: int = 32_000
    max_json_bytes: int = 2**20
    """Of a JSON body: the longest prompt fits, even with every character escaped."""
    max_upload_bytes: int = 32 * 2**20
    """Of a form with images."""
    max_body_s: int = 3
    """Seconds of processor time for reading a body and decoding its image."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or value < 1:
                message = f"{limit.name} must be a whole number, 1 or more, not {value!r}."
                raise SettingError(message, param=limit.name)


@dataclass(frozen=True)
class ServerConfig:
    """All settings of the server."""

    host: str = "127.0.0.1"
    """Only this machine. With 0.0.0.0 others reach it too; then set `api_key`."""
    port: int = 8091
    """0 takes a free one."""
    api_key: str | None = field(default=None, repr=False)
    """Clients must send it as `Authorization: Bearer KEY`. It is never logged."""
    cors_origins: tuple[str, ...] = ()
    """Other sites whose pages may use the server, such as https://example.com."""
    fetch_origins: tuple[str, ...] = ()
    """Sites from which images are fetched that a request names by URL, such as https://images.example.com; by default
    none. A host name must lead to public addresses."""
    allowed_hosts: tuple[str, ...] = ()
    """Other host names of the server, such as example.com behind a proxy."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model for clients; by default that of its folder. The first one is in answers."""
    is_metrics_open: bool = False
    """Whether /metrics needs no key."""
    log_format: str = "text"
    """"text", or "json" for one object per line."""
    limits: Limits = field(default_factory=Limits)
    max_tolerance: float | None = None
    """The most that a request may let the cache "auto" lose, by number or by name; by default whatever it asks for."""
    request_timeout_s: float = 30.0
    """How long a request may take to arrive, from its first byte to its last."""
    shutdown_timeout_s: float = 30.0
    """How long running requests may take to finish when the server shuts down."""
    max_connections: int = 512
    """When there are more, those whose request has not come are closed, the most silent first. Fewer where the system
    allows fewer open files."""
    max_connections_per_address: int | None = None
    """Of one client; by default half of `max_connections`. Behind a proxy all have its address."""
    max_memory: str | int | None = None
    """What bodies (a quarter) and images may take in memory, such as "2GiB"; by default 1 GiB, or what the largest
    allowed request needs. Above it, requests get 503."""
    jobs: str | Path | None = None
    """The folder of videos and of the requests for them, which outlives the server; by default one for each model in
    ~/.local/state/samovar/jobs, or where XDG_STATE_HOME says."""
    job_expiry_s: float = 86_400.0
    """How long a video is kept after it was made."""
    max_job_disk: str | int = "10GiB"
    """What all videos in that folder may take together."""

    @classmethod
    def read(cls, settings: Mapping[str, Any], file: str | Path | None = None) -> ServerConfig:
        """Settings of the server and its limits by name: the given ones over those under `server` in a file."""
        in_file = {} if file is None else read_mapping(file, "config").get("server") or {}
        if not isinstance(in_file, Mapping):
            raise SettingError(f"In {str(file)!r}: server must hold settings by name, not {in_file!r}.", param="server")
        limits = [limit.name for limit in fields(Limits)]
        known = {setting.name for setting in fields(cls)} - {"limits"}
        with naming(file):
            check_names(in_file, [*limits, *known], "a setting of the server")
            all_of_them = {**in_file, **settings}
            for name in ("cors_origins", "fetch_origins", "allowed_hosts", "served_model_name"):
                value = all_of_them.get(name, ())
                all_of_them[name] = (value,) if isinstance(value, str) else tuple(value)
            chosen = Limits(**{name: all_of_them.pop(name) for name in limits if name in all_of_them})
            return cls(limits=chosen, **all_of_them)

    def __post_init__(self) -> None:
        for name in self.served_model_name:
            if not isinstance(name, str) or not 0 < len(name) <= 200 or not name.isprintable() or name != name.strip():
                message = f"{name!r} is not a name for clients. Expected one such as 'flux', of up to 200 characters."
                raise SettingError(message, param="served_model_name")
        if self.max_tolerance is not None:
            object.__setattr__(self, "max_tolerance", read_tolerance(self.max_tolerance, "max_tolerance"))
        if self.log_format not in FORMATS:
            hint = nearest(str(self.log_format), FORMATS)
            raise SettingError(f"log_format={self.log_format!r} is not known. {hint}", param="log_format")
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise SettingError(f"port must be a number from 0 to 65535, not {self.port!r}.", param="port")
        _check_key(self.api_key)
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                message = f"{host!r} is not a host name. Expected one such as example.com, without a port."
                raise SettingError(message, param="allowed_hosts")
        for name in ("cors_origins", "fetch_origins"):
            for origin in getattr(self, name):
                if origin == "*" or "://" not in origin or origin.count("/") != 2:
                    message = f"{origin!r} is not an origin. Expected one such as https://example.com, without a path."
                    raise SettingError(f"{message} Allowing all sites is not supported.", param=name)
        for name in ("max_connections", "max_connections_per_address"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise SettingError(f"{name} must be a whole number, 1 or more, not {value!r}.", param=name)
        if self.memory_bytes < self._least_memory:
            message = f"max_memory={self.max_memory!r} is too little for the largest allowed request, which needs"
            remedy = "Raise it, or lower max_pixels, max_images or max_upload_bytes."
            raise SettingError(f"{message} {self._least_memory:,} bytes. {remedy}", param="max_memory")
        parse_bytes(self.max_job_disk, "max_job_disk")
        for name, least in (
            ("request_timeout_s", "more than 0"),
            ("shutdown_timeout_s", "0 or more"),
            ("job_expiry_s", "more than 0"),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and 0 <= value < float("inf")
            if not is_number or (value == 0 and least == "more than 0"):
                raise SettingError(f"{name} must be a number of seconds, {least}, not {value!r}.", param=name)

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

    def known_hosts(self) -> frozenset[str] | None:
        """The hosts a request may name; None for any. On a local server another name may be a page's DNS rebinding."""
        is_local = self.host in _LOCAL_HOSTS or self.host == "::1" or self.host.startswith("127.")
        if not is_local and not self.allowed_hosts:
            return None
        return frozenset((*_LOCAL_HOSTS, self.host.lower(), *(host.lower() for host in self.allowed_hosts)))


def _check_key(key: object) -> None:
    """Refuse a key that no client could send, without showing it."""
    is_fit = isinstance(key, str) and key.isascii() and key.isprintable() and key and key == key.strip()
    if key is not None and not is_fit:
        message = "api_key must be printable ASCII without spaces around it, because it is sent in a header."
        raise SettingError(f"{message} Leave it out for an open server.", param="api_key")
