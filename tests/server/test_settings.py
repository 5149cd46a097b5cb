"""What a server may be told, and what is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.core.errors import SettingError
from samovar.server.settings import Limits, ServerConfig


def test_the_defaults_reach_this_machine_only() -> None:
    config = ServerConfig()
    assert (config.host, config.port, config.cors_origins, config.is_metrics_open) == ("127.0.0.1", 8091, (), False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 65536}, "port=65536; expected a whole number from 0 to 65535"),
        ({"port": "8091"}, "port='8091'; expected"),
        ({"api_key": ""}, "must be printable ASCII"),
        ({"api_key": "schlüssel"}, "must be printable ASCII"),
        ({"api_key": "key "}, "without spaces around it"),
        ({"api_key": 123}, "must be printable ASCII"),
        (
            {"allowed_hosts": ("https://example.com",)},
            "expected a host name such as example.com, without a port, or several. 'https://example.com' is not one",
        ),
        ({"allowed_hosts": ("",)}, "'' is not one"),
        ({"request_timeout_s": 0}, "request_timeout_s=0; expected a number of seconds above 0"),
        ({"cors_origins": ("*",)}, "'*' is not one"),
        ({"cors_origins": ("https://example.com/page",)}, "without a path"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s=inf; expected a number of seconds"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s=-1; expected a number of seconds, 0 or more"),
        ({"max_connections": 0}, "max_connections=0; expected a whole number, 1 or more"),
        ({"max_jobs": 1.5}, "max_jobs=1.5; expected a whole number"),
        ({"max_memory": "2 gigs"}, "max_memory='2 gigs'; expected a size"),
        ({"max_memory": "100MiB"}, "max_memory='100MiB' is too little for the largest allowed request"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message.replace("*", r"\*")):
        ServerConfig(**settings)


def test_limits_are_whole_numbers_from_one_on() -> None:
    for value in (0, -1, 1.5, True, "9"):
        with pytest.raises(SettingError, match=r"max_steps=.*; expected a whole number, 1 or more"):
            Limits(max_steps=value)  # type: ignore[arg-type]


def test_without_a_file_none_is_named() -> None:
    with pytest.raises(SettingError, match=r"^max_frames=0; expected a whole number, 1 or more"):
        ServerConfig.read_over({"max_frames": 0})


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key="secret"))


def test_memory_is_enough_for_the_largest_request() -> None:
    assert ServerConfig().memory_bytes == 2**30
    assert ServerConfig(max_memory="3GiB").memory_bytes == 3 * 2**30
    large = Limits(max_pixels=2**26)
    assert ServerConfig(limits=large).memory_bytes * 3 // 4 >= 8 * 2**26 * (large.max_images + 1)


def test_settings_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "samovar.yaml"
    file.write_text(
        "model: emoji\nserver: {port: 1, max_steps: 7, served_model_name: flux, cors_origins: [http://a]}\n"
    )
    config = ServerConfig.read_over({"port": 2, "allowed_hosts": ["b"]}, file)
    assert (config.port, config.limits.max_steps, config.served_model_name) == (2, 7, ("flux",))
    assert (config.cors_origins, config.allowed_hosts) == (("http://a",), ("b",))
    for content, message in (
        ("{prt: 1}", r"In '.*samovar.yaml': 'prt' is not a setting of the server. Did you mean 'port'"),
        ("[1]", "server must hold settings by name"),
        ("{served_model_name: ['']}", "expected a name for clients, .*'' is not one"),
    ):
        file.write_text(f"server: {content}\n")
        with pytest.raises(SettingError, match=message):
            ServerConfig.read_over({}, file)
