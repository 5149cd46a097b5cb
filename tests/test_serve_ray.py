"""Replicas of the server on Ray Serve: a real cluster of three nodes here, of which a replica and then a node are
killed. Run by `make test-ray`."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

pytestmark = [
    pytest.mark.ray,
    # Ray's own, at its start and its end.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

REQUEST = {"prompt": "a cat", "size": "16x16", "num_inference_steps": 2, "seed": 3}


class Served(NamedTuple):
    """A cluster whose head has the proxy, and whose other nodes have room for one replica each."""

    address: str
    cluster: Any


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ray = pytest.importorskip("ray")
    from ray import serve
    from ray.cluster_utils import Cluster

    from pipelines import tiny_flux_pipeline
    from samovar.serve_ray import build

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, namespace="samovar")
        serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
        settings = {"model": str(folder), "device": "cpu", "num_replicas": "2", "num_cpus": "1"}
        serve.run(build({**settings, "health_period_s": "1", "drain_s": "5"}), route_prefix="/")
        yield Served(f"http://127.0.0.1:{port}", cluster)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def address(served: Served) -> str:
    return served.address


def client(address: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=5, timeout=120)


def picture(answer: Any) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json))).tobytes()


def make(address: str, steps: int = 2) -> bytes:
    extra = {"num_inference_steps": steps, "seed": REQUEST["seed"]}
    return picture(client(address).images.generate(prompt=REQUEST["prompt"], size=REQUEST["size"], extra_body=extra))


def replicas() -> set[int]:
    """The processes of the replicas that Ray takes for well."""
    import psutil
    from ray import serve

    states = serve.status().applications["default"].deployments["samovar"].replica_states
    titles = {process.pid: process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"])}
    found = {pid for pid, title in titles.items() if title[0].startswith("ray::ServeReplica")}
    return found if len(found) == states.get("RUNNING", 0) else set()


def eventually(what: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(1)


def test_two_replicas_share_the_work_and_make_the_same_picture(address: str) -> None:
    eventually(lambda: len(replicas()) == 2)
    with ThreadPoolExecutor(8) as clients:
        assert len(set(clients.map(lambda _: make(address), range(8)))) == 1


def test_a_replica_that_is_killed_is_replaced_and_the_other_serves_on(address: str) -> None:
    expected = make(address)
    before = replicas()
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    assert [make(address) for _ in range(4)] == [expected] * 4
    eventually(lambda: len(replicas()) == 2)
    assert len(replicas() - before) == 1, "a new one"
    assert make(address) == expected


def kill_node(cluster: Any) -> set[int]:
    """End a machine: all processes of a node at once. Gives those that there were."""
    import psutil

    node = cluster.worker_nodes[0] if isinstance(cluster.worker_nodes, list) else next(iter(cluster.worker_nodes))
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [raylet, *raylet.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cluster.remove_node(node, allow_graceful=False)
    return {process.pid for process in processes}


def insist(address: str, statuses: list[int]) -> bytes:
    """Ask until there is a picture, as clients do that are told of an error of the server, and note what was said."""
    import httpx

    body = {**REQUEST, "num_inference_steps": 200}
    while True:
        answer = httpx.post(f"{address}/v1/images/generations", json=body, timeout=300)
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            data = base64.b64decode(answer.json()["data"][0]["b64_json"])
            return Image.open(io.BytesIO(data)).tobytes()
        time.sleep(0.5)


def test_a_node_that_is_killed_under_load_loses_no_request(served: Served) -> None:
    eventually(lambda: len(replicas()) == 2)
    expected, statuses = make(served.address, steps=200), list[int]()
    before = replicas()
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(insist, served.address, statuses) for _ in range(24)]
        eventually(lambda: len(statuses) >= 4)
        killed = kill_node(served.cluster)
        assert len(before & killed) == 1, "one replica was on this node"
        assert [each.result(600) for each in asked] == [expected] * 24
    told = [status for status in statuses if status != 200]
    assert told, "something ran on the node"
    assert {status // 100 for status in told} == {5}, "whatever ran there was told that the server failed"
    served.cluster.add_node(num_cpus=1)
    eventually(lambda: len(replicas()) == 2 and len(replicas() - before) == 1)
    assert make(served.address, steps=200) == expected


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_replica": "2"}, "Did you mean 'num_replicas'"),
        ({"num_replicas": "0"}, "num_replicas=0; expected a whole number, 1 or more"),
        ({"num_replicas": "2", "max_replicas": "4"}, "not both"),
        ({"api_key": 123}, "api_key must be text, not int. Put it in quotes"),
        ({"cache_backend": "tee_cache"}, "Did you mean 'tea_cache'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_starts(settings: dict[str, Any], says: str) -> None:
    from samovar.core.errors import SettingError
    from samovar.serve_ray import build

    with pytest.raises(SettingError, match=says):
        build(settings)


@pytest.mark.parametrize("given", ["0123", "no", "1e3", "null", None])
def test_a_key_is_taken_as_it_is(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from samovar.serve_ray import _key

    monkeypatch.setenv("SAMOVAR_API_KEY", "of-the-environment")
    assert _key(given) == (given or "of-the-environment")


def test_settings_become_rays(tmp_path: Path) -> None:
    from samovar.engine import OmniDiffusionConfig
    from samovar.serve_ray import RayConfig

    engine = OmniDiffusionConfig(device="cpu", max_queue=4)
    assert RayConfig(num_replicas=3).options(engine)["num_replicas"] == 3
    options = RayConfig(min_replicas=2, max_replicas=16, num_gpus=1).options(engine)
    assert options["autoscaling_config"]["max_replicas"] == 16
    assert options["ray_actor_options"]["num_gpus"] == 1
    assert options["max_ongoing_requests"] == 1 + 4 + 8
    twins = OmniDiffusionConfig(device="cpu", max_queue=4, replicas=2)
    assert RayConfig().options(twins)["max_ongoing_requests"] == 2 + 4 + 8
