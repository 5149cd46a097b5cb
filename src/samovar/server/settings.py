"""How is the server reached, and what may be asked of it? Every setting, checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..errors import SettingError

KIB, MIB = 2**10, 2**20


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
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise SettingError("The API key must be printable ASCII and not empty: it travels in a header.")
        for origin in self.cors_origins:
            if origin == "*" or "://" not in origin or origin.count("/") != 2:
                raise SettingError(
                    f"{origin!r} is no origin. Expected one such as https://example.com, without a path. "
                    "A server that every page may use is not offered."
                )
        for name in ("request_timeout_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise SettingError(f"{name} must be a number of seconds from 0 on, not {value!r}.")
