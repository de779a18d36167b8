"""docker/ against the command line, the settings and itself: what Docker and Kubernetes would say only when run."""

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml

from kvevents_service.cli import kvevents
from kvevents_service.config import ServeConfig
from kvevents_service.engine.__main__ import main as engine_command

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
spec = importlib.util.spec_from_file_location("docker_check", ROOT / "tools" / "docker_check.py")
docker_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docker_check)

STAGES = docker_check.stages((DOCKER / "Dockerfile").read_text())
IMAGE = STAGES[-1]
USER = "65532:65532"
PORTS = {"events": 5557, "replay": 5558, "admin": 9470}
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
OURS = {name: one for name, one in COMPOSE["services"].items() if one.get("image", "").startswith("kvevents")}
MANIFESTS = {
    (one["kind"], one["metadata"]["name"]): one
    for path in sorted((DOCKER / "kubernetes").glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
}
POD = MANIFESTS["Deployment", "vllm"]["spec"]["template"]["spec"]
CONTAINERS = {one["name"]: one for one in (*POD["initContainers"], *POD["containers"])}
LATEST = re.compile(r"(:latest|^[^:@]+)$")


def settings_of(text: str) -> ServeConfig:
    """A file of settings as `serve` takes it."""
    told = tomllib.loads(text)
    if "admin" not in ServeConfig.__struct_fields__:
        del told["admin"]  # the admin endpoint is not in this tree yet
    return msgspec.convert(told, ServeConfig)


COMPOSE_SETTINGS = (DOCKER / "sidecar.toml").read_text()
POD_SETTINGS = MANIFESTS["ConfigMap", "kvevents"]["data"]["sidecar.toml"]


def understood(words: list[str]) -> click.Context:
    """The words after `kvevents`, parsed by the command that they name. Raises what click raises."""
    name, *rest = words
    return kvevents.commands[name].make_context(name, list(rest))


# the Dockerfile


def test_every_base_is_pinned_by_a_version() -> None:
    assert {stage.base for stage in STAGES} == {STAGES[0].base}
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", STAGES[0].base)


def test_the_image_runs_as_a_user_by_number_after_every_step() -> None:
    names = [one.name for one in IMAGE.instructions]
    assert IMAGE.last("USER").text == USER
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :])


def test_the_entry_point_is_tini_and_the_command_is_understood() -> None:
    assert IMAGE.last("ENTRYPOINT").words == ["tini", "--", "kvevents"]
    context = understood(IMAGE.last("CMD").words)
    engine_socket, state = context.params["engine_socket"], context.params["state_dir"]
    volumes = IMAGE.last("VOLUME").words
    assert [str(Path(engine_socket).parent), state] == volumes


def test_its_directories_are_private_and_its_users() -> None:
    (made,) = [one.text for one in IMAGE.instructions if "install -d" in one.text]
    uid, gid = USER.split(":")
    assert f"install -d -o {uid} -g {gid} -m 0700 {' '.join(IMAGE.last('VOLUME').words)}" in made
    assert f"--uid {uid} --gid {gid}" in made


def test_every_port_is_exposed_and_the_default_one() -> None:
    assert [int(port) for port in IMAGE.last("EXPOSE").text.split()] == [*PORTS.values()]
    default = ServeConfig()
    assert default.pub.endswith(f":{PORTS['events']}")
    assert str(default.replay).endswith(f":{PORTS['replay']}")


def test_the_health_check_asks_the_admin_port() -> None:
    _, _, command = IMAGE.last("HEALTHCHECK").text.partition("CMD ")
    *_, code = json.loads(command)
    compile(code, "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{PORTS['admin']}/healthz" in code


def test_what_is_copied_is_there_and_let_through() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        name
        for stage in STAGES
        for one in stage.instructions
        if one.name == "COPY" and not one.text.startswith("--from")
        for name in one.text.split()[:-1]
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert name in allowed


def test_the_build_argument_chooses_the_torch() -> None:
    build = STAGES[0]
    arguments = {name: value for one in build.instructions if one.name == "ARG" for name, value in
                 docker_check.assignments(one).items()}  # fmt: skip
    assert arguments["ACCELERATOR"] == "cpu"
    assert f"TORCH_CPU={arguments['TORCH']}\n" in (ROOT / "tools" / "setup_venv.sh").read_text()
    (choosing,) = [one.text for one in build.instructions if "case" in one.text]
    assert {"cpu)", "cuda)", "*)"} <= set(choosing.split())


# compose


def words_of(service: dict[str, Any]) -> list[str]:
    return [*(service.get("entrypoint") or IMAGE.last("ENTRYPOINT").words), *service.get("command", [])]


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_says_what_the_command_line_takes(name: str) -> None:
    tini, mark, *words = words_of(OURS[name])
    assert (tini, mark) == ("tini", "--")
    if words[0] == "kvevents":
        understood(words[1:])
    elif words[:3] == ["python", "-m", "kvevents_service.engine"]:
        told = [word.replace("/opt/kvevents/trace", str(ROOT / "kvevents_service/data")) for word in words[3:]]
        engine_command.make_context("engine", told)
    else:
        assert words[:2] == ["python", "/opt/kvevents/share/router.py"]
        assert re.fullmatch(r"\w+=tcp://sidecar:5557,tcp://sidecar:5558", words[2])


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_is_hardened(name: str) -> None:
    service = OURS[name]
    assert service["read_only"] is True
    assert service["user"] == USER
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert not service.get("ports"), "events are not for the host"


def test_the_parts_of_the_story_are_all_there() -> None:
    assert set(COMPOSE["services"]) == {"sidecar", "engine", "tail", "router", "prometheus", "grafana"}
    for name, service in COMPOSE["services"].items():
        assert not LATEST.search(service["image"]), name
        assert set(service.get("depends_on") or ()) <= set(COMPOSE["services"])
        assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_events_stay_in_a_network_without_a_way_out() -> None:
    assert COMPOSE["networks"]["events"]["internal"] is True
    reached = {name for name, service in COMPOSE["services"].items() if "events" in service["networks"]}
    assert reached == set(OURS)
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_what_compose_mounts_is_there() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source, _ = volume.split(":", 1)
            known = source in COMPOSE["volumes"] or (DOCKER / source).exists()
            assert known or source == "./grafana", (name, source)  # the dashboards come with the admin endpoint


def test_engine_and_sidecar_of_compose_meet() -> None:
    config = settings_of(COMPOSE_SETTINGS)
    (told,) = [word for word in OURS["engine"]["command"] if word.startswith("--engine-socket=")]
    assert told == f"--engine-socket={config.engine_socket}"
    assert "run:/run/kvevents" in OURS["engine"]["volumes"]
    assert "run:/run/kvevents" in OURS["sidecar"]["volumes"]
    assert f"state:{config.state_dir}" in OURS["sidecar"]["volumes"]


@pytest.mark.parametrize("text", [COMPOSE_SETTINGS, POD_SETTINGS])
def test_the_settings_of_both_stand_and_have_the_ports_that_others_name(text: str) -> None:
    config, told = settings_of(text), tomllib.loads(text)
    assert config.pub == f"tcp://0.0.0.0:{PORTS['events']}"
    assert config.replay == f"tcp://0.0.0.0:{PORTS['replay']}"
    assert told["admin"] == f"0.0.0.0:{PORTS['admin']}"


def test_prometheus_and_grafana_find_what_they_look_for() -> None:
    (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"sidecar:{PORTS['admin']}"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert "metrics" in OURS["sidecar"]["networks"]
    (source,) = yaml.safe_load((DOCKER / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DOCKER / "provisioning/dashboards/kvevents.yaml").read_text())["providers"]
    assert f"./grafana:{provider['options']['path']}:ro" in COMPOSE["services"]["grafana"]["volumes"]


# Kubernetes


def test_every_manifest_says_what_it_is() -> None:
    kinds = {kind: one["apiVersion"] for (kind, _), one in MANIFESTS.items()}
    assert kinds == {
        "ConfigMap": "v1",
        "Deployment": "apps/v1",
        "NetworkPolicy": "networking.k8s.io/v1",
        "PodMonitor": "monitoring.coreos.com/v1",
    }


def test_the_sidecar_is_a_native_one_and_starts_last_of_those_before_vllm() -> None:
    assert [one.get("restartPolicy") for one in POD["initContainers"]] == [None, "Always"]
    assert POD["initContainers"][-1]["name"] == "kvevents"
    assert [one["name"] for one in POD["containers"]] == ["vllm"]


def test_the_pod_is_one_user_that_is_not_root() -> None:
    uid, gid = map(int, USER.split(":"))
    context = POD["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
    assert context["runAsNonRoot"] is True
    for name, container in CONTAINERS.items():
        own = container["securityContext"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["allowPrivilegeEscalation"] is False
        assert "runAsUser" not in own
        assert own.get("readOnlyRootFilesystem") is (None if name == "vllm" else True)
        assert container["resources"]["limits"]["memory"]
        assert not LATEST.search(container["image"])


def mounts(container: str) -> dict[str, str]:
    return {one["name"]: one["mountPath"] for one in CONTAINERS[container]["volumeMounts"]}


def test_every_mount_has_its_volume_and_every_volume_a_use() -> None:
    named = {name for container in CONTAINERS for name in mounts(container)}
    assert named == {volume["name"] for volume in POD["volumes"]}


def test_vllm_and_the_sidecar_share_socket_and_memory() -> None:
    for name in ("run", "shm"):
        assert mounts("vllm")[name] == mounts("kvevents")[name]
    assert mounts("vllm")["shm"] == "/dev/shm"
    config = settings_of(POD_SETTINGS)
    (told,) = [word for word in CONTAINERS["vllm"]["args"] if word.startswith("--kv-transfer-config=")]
    connector = json.loads(told.partition("=")[2])
    assert connector["kv_connector_extra_config"] == {"sidecar": config.engine_socket}
    assert config.engine_socket.startswith(f"{mounts('kvevents')['run']}/private/"), "below the volume: see README"
    assert str(config.state_dir).startswith(f"{mounts('kvevents')['state']}/")


def test_the_sidecars_command_and_settings_are_where_they_are_looked_for() -> None:
    context = understood(CONTAINERS["kvevents"]["args"])
    assert str(context.params["config"]) == f"{mounts('kvevents')['config']}/sidecar.toml"
    (volume,) = [one for one in POD["volumes"] if one["name"] == "config"]
    assert ("ConfigMap", volume["configMap"]["name"]) in MANIFESTS


def test_the_tier_fits_into_the_containers_memory_and_the_drain_into_the_grace() -> None:
    config = settings_of(POD_SETTINGS)
    limit = CONTAINERS["kvevents"]["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert (config.host_bytes or 0) + (2 << 30) <= int(limit[:-2]) << 30
    assert config.stop_s < POD["terminationGracePeriodSeconds"]


def test_ports_and_probes_agree() -> None:
    container = CONTAINERS["kvevents"]
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == PORTS
    probes = {name: one["httpGet"] for name, one in container.items() if name.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/healthz", "port": "admin"},
        "livenessProbe": {"path": "/healthz", "port": "admin"},
        "readinessProbe": {"path": "/readyz", "port": "admin"},
    }


def opened(policy: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """Ports, and whether only some may reach them."""
    for rule in policy["spec"]["ingress"]:
        yield from ((one["port"], bool(rule.get("from"))) for one in rule["ports"])


def test_the_policy_guards_events_and_metrics() -> None:
    policy = MANIFESTS["NetworkPolicy", "vllm"]
    labels = MANIFESTS["Deployment", "vllm"]["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    reachable = dict(opened(policy))
    assert {port: reachable[port] for port in PORTS.values()} == dict.fromkeys(PORTS.values(), True)
    (http,) = CONTAINERS["vllm"]["ports"]
    assert reachable.keys() == {*PORTS.values(), http["containerPort"]}


def test_the_monitor_finds_the_pod_and_its_port() -> None:
    monitor = MANIFESTS["PodMonitor", "vllm-kvevents"]["spec"]
    labels = MANIFESTS["Deployment", "vllm"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in PORTS
    assert endpoint["path"] == "/metrics"


def test_selectors_and_labels_of_the_deployment_agree() -> None:
    deployment = MANIFESTS["Deployment", "vllm"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]


# the reader of Dockerfiles


def test_a_dockerfile_is_read_with_its_continued_lines_and_stages() -> None:
    text = 'ARG BASE=a:1\nFROM ${BASE} AS one\n# note\nRUN x \\\n  # in between\n  && y\nFROM b:2\nCMD ["z", "1"]\n'
    first, second = docker_check.stages(text)
    assert (first.base, first.name) == ("a:1", "one")
    assert first.last("RUN").text == "x && y"
    assert (second.base, second.name) == ("b:2", "")
    assert second.last("CMD").words == ["z", "1"]
