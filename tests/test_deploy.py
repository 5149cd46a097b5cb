"""What is in deploy/ fits the server: its options, its addresses, its port and its metrics. Nothing is built here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from fastapi.routing import APIRoute

from samovar.cli.entry import make_parser
from samovar.engine import EngineStatus, OmniDiffusionConfig, ReplicaStatus
from samovar.omni import AsyncOmni
from samovar.server.app import create_app
from samovar.server.metrics import Metrics
from samovar.server.settings import ServerConfig
from samovar.server.state import AppState

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
                "ENTRYPOINT", "CMD"}  # fmt: skip


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def dockerfile() -> list[tuple[str, str]]:
    """The instructions, with their lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def parsed(command: list[str]) -> Any:
    """A command of ours as our own parser reads it; one that it refuses ends the test."""
    assert command[0].rpartition("/")[2] == "samovar", command
    return make_parser().parse_args(command[1:])


def routes() -> set[str]:
    app: Any = create_app(AppState(AsyncOmni("emoji", device="cpu"), ServerConfig()))
    return {route.path for route in app._app.routes if isinstance(route, APIRoute)}


def check_settings(file: Path) -> ServerConfig:
    """A file of settings is read whole, by the engine and by the server."""
    OmniDiffusionConfig.read({"device": "cpu"}, file)
    return ServerConfig.read_over({}, file)


def test_the_dockerfile_copies_what_is_there_and_starts_the_server() -> None:
    steps = dockerfile()
    assert {name for name, _ in steps} == INSTRUCTIONS
    assert steps[0][0] == "FROM"
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for source in [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored, f"{source} does not reach the builder"
    last = dict(steps)
    options = parsed([*json.loads(last["ENTRYPOINT"]), *json.loads(last["CMD"])])
    assert (options.host, options.positional_model, options.log_format) == ("0.0.0.0", "emoji", "json")
    assert last["EXPOSE"] == str(ServerConfig().port)
    assert last["USER"] == "10001"
    assert last["ENV"].count("=/models/.") == 2, "what is kept is on the volume"
    probe = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", last["HEALTHCHECK"])
    assert probe == [(last["EXPOSE"], "/ready")]
    json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    extras = next(rest for name, rest in steps if name == "ARG" and rest.startswith("EXTRAS"))
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(extras.partition("=")[2].split(",")) <= set(known)


def test_compose_starts_the_server_with_prometheus_and_grafana() -> None:
    compose = read("compose.yaml")
    entry = json.loads(dict(dockerfile())["ENTRYPOINT"])
    command = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", part) for part in compose["services"]["samovar"]["command"]]
    options = parsed([*entry, *command])
    assert (options.positional_model, options.is_metrics_open, options.warm_up) == ("emoji", True, True)
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"], volume
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "open to this machine only"
    targets = read("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == [f"samovar:{ServerConfig().port}"]
    assert read("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]["url"] == "http://prometheus:9090"
    folder = read("grafana/provisioning/dashboards/samovar.yaml")["providers"][0]["options"]["path"]
    assert f"./grafana/dashboard.json:{folder}/samovar.json:ro" in compose["services"]["grafana"]["volumes"]


def exposed() -> set[str]:
    """The names in /metrics, with a value for each."""
    metrics = Metrics(lambda: EngineStatus("emoji", failures={"queue_full": 1}, replicas=(ReplicaStatus(),)))
    metrics.count("POST", "/v1/images/generations", 200, 1.0)
    return {line.split("{")[0].split()[0] for line in metrics.text().decode().splitlines() if line[:1] != "#"}


def test_the_dashboard_shows_metrics_that_exist_and_all_of_them() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    shown = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"samovar_\w+", target["expr"])
    }
    names = {name for name in exposed() if not name.endswith(("_created", "_sum", "_count"))}
    assert shown == names


def test_kubernetes_probes_the_addresses_of_the_server(tmp_path: Path) -> None:
    with (DEPLOY / "kubernetes.yaml").open(encoding="utf-8") as file:
        parts = {part["kind"]: part for part in yaml.safe_load_all(file)}
    assert set(parts) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"}
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parsed([*container["command"], *container["args"]])
    (name,) = parts["ConfigMap"]["data"]
    assert options.config == f"{container['volumeMounts'][0]['mountPath']}/{name}"
    file = tmp_path / name
    file.write_text(parts["ConfigMap"]["data"][name])
    config = check_settings(file)
    assert [port["containerPort"] for port in container["ports"]] == [config.port]
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_timeout_s
    probes = {kind: probe["httpGet"] for kind, probe in container.items() if kind.endswith("Probe")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready",
    }  # fmt: skip
    assert {probe["path"] for probe in probes.values()} <= routes()
    assert {probe["port"] for probe in probes.values()} == {container["ports"][0]["name"]}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= OmniDiffusionConfig().load_timeout_s
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == parts["Service"]["spec"]["selector"] == parts["Deployment"]["spec"]["selector"]["matchLabels"]
    (claim,) = re.findall(r"'claimName': '([\w-]+)'", str(pod))
    assert claim == parts["PersistentVolumeClaim"]["metadata"]["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_systemd_starts_the_server_and_waits_for_it() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "samovar.service")
    service = unit["Service"]
    parsed(shlex.split(service["ExecStart"]))
    assert int(service["TimeoutStopSec"]) > check_settings(DEPLOY / "samovar.yaml").shutdown_timeout_s
