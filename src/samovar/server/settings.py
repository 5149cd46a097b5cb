"""How is the server reached, and what may be asked of it? Every setting, checked before anything is started."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from ..errors import SettingError

KIB, MIB = 2**10, 2**20
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]", flags=re.ASCII)


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for. All of it is checked before anything is allocated."""

    max_pixels: int = 2048 * 2048
    """Of one picture, made or sent."""
    max_steps: int = 200
    max_pictures: int = 10
    max_prompt_characters: int = 32_000
    max_json_bytes: int = MIB
    """Of a body without pictures: a prompt of the greatest length fits, with every character escaped."""
    max_upload_bytes: int = 32 * MIB
    """Of a body with pictures."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if type(value) is not int or value < 1:
                raise SettingError(f"{limit.name} must be a whole number from 1 on, not {value!r}.")


@dataclass(frozen=True)
class ServerConfig:
    """What is wished for."""

    host: str = "127.0.0.1"
    """This machine only. Others reach it at 0.0.0.0; then give an `api_key`."""
    port: int = 8091
    """0 takes one that is free."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must send as `Authorization: Bearer KEY`. It is never written anywhere."""
    cors_origins: tuple[str, ...] = ()
    """Pages of other sites that may use the server, such as https://example.com."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the server is reached beside those of this machine, such as example.com behind a proxy."""
    is_metrics_open: bool = False
    """Whether /metrics is read without the key."""
    limits: Limits = field(default_factory=Limits)
    request_timeout_s: float = 30.0
    """How long a request may take to arrive, from its first byte to its last."""
    shutdown_timeout_s: float = 30.0
    """How long what is running may take to finish when the server is told to end."""

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port <= 65535:
            raise SettingError(f"port must be a number from 0 to 65535, not {self.port!r}.")
        _check_key(self.api_key)
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise SettingError(f"{host!r} is no host. Expected a name such as example.com, without a port.")
        for origin in self.cors_origins:
            if origin == "*" or "://" not in origin or origin.count("/") != 2:
                raise SettingError(
                    f"{origin!r} is no origin. Expected one such as https://example.com, without a path. "
                    "A server that every page may use is not offered."
                )
        for name, words in (("request_timeout_s", "above 0"), ("shutdown_timeout_s", "from 0 on")):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and 0 <= value < float("inf")
            if not is_number or (value == 0 and words == "above 0"):
                raise SettingError(f"{name} must be a number of seconds {words}, not {value!r}.")

    def known_hosts(self) -> frozenset[str] | None:
        """The hosts that a request may name; None for any. Who reaches this machine by another name may be a page of
        another site, whose name was made to point here."""
        is_local = self.host in _LOCAL_HOSTS or self.host == "::1" or self.host.startswith("127.")
        if not is_local and not self.allowed_hosts:
            return None
        return frozenset((*_LOCAL_HOSTS, self.host.lower(), *(host.lower() for host in self.allowed_hosts)))


def _check_key(key: object) -> None:
    """Refuse a key that no client could send. It is not shown."""
    is_fit = isinstance(key, str) and key.isascii() and key.isprintable() and key and key == key.strip()
    if key is not None and not is_fit:
        raise SettingError(
            "The API key must be printable ASCII and not empty, without spaces around it: it travels in a header. "
            "Give none at all for a server that is open."
        )
