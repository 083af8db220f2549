"""The files in `deploy/` are valid for their tools, and agree with each other and with the server."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
KUBERNETES = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
RELEASES = ("1.30", "1.37")  # of Kubernetes: oldest and newest checked
BOARD = DEPLOY / "compose" / "grafana" / "llmcache.json"


def _read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _objects(kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the Kubernetes objects, of one kind if given."""
    for path in KUBERNETES:
        for found in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if kind in (None, found["kind"]):
                yield found


def _containers() -> Iterator[dict[str, Any]]:
    for found in _objects("Deployment"):
        yield from found["spec"]["template"]["spec"]["containers"]


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    unit = tmp_path / "llmcache.service"
    text = (DEPLOY / unit.name).read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/llmcache/bin/llmcache", sys.executable))  # an existing executable
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("release", RELEASES)
def test_the_manifests_are_of_kubernetes_own_schema(release: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for found in _objects():
        kubernetes_validate.validate(found, release, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate({**found, "spec": {"replica": 2}}, release, strict=True)


def test_the_manifests_fit_each_other() -> None:
    assert set(_read(DEPLOY / "kubernetes" / "kustomization.yaml")["resources"]) == {one.name for one in KUBERNETES}
    (secret,), (config,) = _objects("Secret"), _objects("ConfigMap")
    names = set(secret["stringData"])
    pods = [found["spec"]["template"]["metadata"]["labels"] for found in _objects("Deployment")]
    ports = [{port["name"] for port in one["ports"]} for one in _containers()]
    for service in _objects("Service"):
        number = pods.index(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[number]
    for container in _containers():
        asked = [variable["valueFrom"]["secretKeyRef"] for variable in container.get("env", ())]
        assert {one["name"] for one in asked} <= {secret["metadata"]["name"]} and {one["key"] for one in asked} <= names
    (server,) = (found for found in _objects("Deployment") if found["metadata"]["name"] == "llmcache")
    keys, cache = server["spec"]["template"]["spec"]["volumes"]
    assert keys["secret"]["secretName"] == secret["metadata"]["name"] and keys["secret"]["items"][0]["key"] in names
    assert cache["configMap"]["name"] == config["metadata"]["name"]


def test_the_servers_of_kubernetes_are_probed_limited_and_refuse_everybody_at_first(tmp_path: Path) -> None:
    from llmcache.serving.keys import read_keys

    (server,) = (one for one in _containers() if one["name"] == "server")
    for probe in ("startupProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert server["livenessProbe"]["tcpSocket"] == {"port": "http"}  # a draining server must stay alive
    assert set(server["resources"]) == {"requests", "limits"}
    (secret,) = _objects("Secret")
    (tmp_path / "keys.yaml").write_text(secret["stringData"]["keys.yaml"])
    assert read_keys(tmp_path / "keys.yaml") == []
    assert "--keys=/etc/llmcache/keys/keys.yaml" in server["args"]
    assert all(not value or value == "[]" for value in secret["stringData"].values())  # no shared default secret


def test_servers_are_started_with_options_and_settings_that_there_are() -> None:
    import typer

    from llmcache.cli.main import app
    from llmcache.config import CacheConfig

    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serve.params for option in parameter.opts}
    compose = _read(DEPLOY / "compose.yaml")
    commands = [one["command"] for name, one in compose["services"].items() if name.startswith("server")]
    commands += [one["args"] for one in _containers() if one["name"] == "server"]
    assert len(commands) == 3
    assert {word.partition("=")[0] for words in commands for word in words if word.startswith("--")} <= known
    (config,) = _objects("ConfigMap")
    of_kubernetes = CacheConfig.make(yaml.safe_load(config["data"]["cache.yaml"]))
    of_compose = CacheConfig.make(DEPLOY / "compose" / "cache.yaml")
    for settings, host in ((of_kubernetes, "llmcache-redis"), (of_compose, "redis")):
        assert settings.store is not None and settings.store.options["url"] == f"redis://{host}:6379"


def test_compose_takes_its_file_and_what_it_mounts_is_there() -> None:
    compose = pytest.importorskip("compose_spec").PyCompose
    found = _read(DEPLOY / "compose.yaml")  # YAML has resolved anchors and merges
    names = compose.from_json(json.dumps(found)).service_names()
    assert set(names) == {"server-1", "server-2", "redis", "prometheus", "grafana"}
    with pytest.raises(ValueError, match="comand"):
        compose.from_json(json.dumps({"services": {"redis": {"image": "redis", "comand": ["redis-server"]}}}))
    for service in found["services"].values():
        mounted = [one.split(":")[0] for one in service.get("volumes", ()) if one.startswith("./")]
        assert all((DEPLOY / one).is_file() for one in mounted)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    (scraped,) = _read(DEPLOY / "compose" / "prometheus.yaml")["scrape_configs"]
    targets = scraped["static_configs"][0]["targets"]
    assert [one.partition(":")[0] for one in targets] == ["server-1", "server-2"]


def _exported(tmp_path: Path) -> tuple[set[str], set[str]]:
    """Return the names of a server's samples, as Prometheus stores them, and of their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    from tests.serving.served import Client, make_server, write

    parts = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    names, labels = set(), set()
    server = make_server(write(tmp_path, "classifier"))
    with Client(server) as client:
        for is_disabled in (False, False, True):  # a miss, a hit, a bypass
            server.is_disabled = is_disabled
            client.post("/predict", json={"inputs": "my card"}).raise_for_status()
        for family in text_string_to_metric_families(server.metrics.text().decode()):
            names |= {family.name + part for part in parts.get(family.type, ("",))}
            labels |= {label for sample in family.samples for label in sample.labels}
    return names, labels


def test_the_dashboard_asks_for_what_a_server_exports(tmp_path: Path) -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [one["query"] for one in board["templating"]["list"]]
    names, labels = _exported(tmp_path)
    for query in asked:
        wanted = set(re.findall(r"\b(?:llmcache|process)_\w+", query))
        assert wanted or query == 'sum(up{job="llmcache"})'
        assert wanted <= names, query
        grouped = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(", ")}
        selected = set(re.findall(r"(\w+)=~?\"", query))
        assert grouped | selected <= labels | {"instance", "job"}, query  # Prometheus adds these two
    assert len(asked) > 30


def test_the_dashboard_is_the_one_that_is_provided_and_its_panels_lie_side_by_side() -> None:
    (source,) = _read(BOARD.with_name("datasource.yaml"))["datasources"]
    (provider,) = _read(BOARD.with_name("dashboards.yaml"))["providers"]
    mounted = _read(DEPLOY / "compose.yaml")["services"]["grafana"]["volumes"]
    assert f"./compose/grafana/{BOARD.name}:{provider['options']['path']}/{BOARD.name}:ro" in mounted
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells = {(column, line) for column in range(x, x + w) for line in range(y, y + h)}
        assert not cells & taken and x + w <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_image_is_reached_from_outside_by_default() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    entry, command = (json.loads(re.findall(rf"^{name} (.*)$", text, re.M)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert [*entry, *command] == ["llmcache", "serve", "--model", "minilm", "--host", "0.0.0.0"]
