"""docker-compose.yml and what it builds from, checked by reading: no container engine is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotfish_broker.settings import Settings

ROOT = Path(__file__).parents[2]
WORKERS = ("verify", "verify-gpu", "draft")
SCALED = ("verify", "draft")
PASSWORDS = {"REDIS_PASSWORD": "hush", "FLOWER_PASSWORD": "secret"}
CONTRACT = {
    "PILOTFISH_BROKER_URL",
    "PILOTFISH_CACHE",
    "PILOTFISH_DATA_URL",
    "PILOTFISH_DEVICE",
    "PILOTFISH_DRAFT",
    "PILOTFISH_DTYPE",
    "PILOTFISH_KV_TOKENS",
    "PILOTFISH_LEASE_SECONDS",
    "PILOTFISH_MODEL",
    "PILOTFISH_NAMESPACE",
    "PILOTFISH_SLOTS",
    "PILOTFISH_SPECULATION",
    "PILOTFISH_TARGET",
    "PILOTFISH_THREADS",
}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "workers" / "Dockerfile").read_text(encoding="utf-8")


class Refused(Exception):
    """A variable that must be set is not."""


def interpolate(value: Any, variables: dict[str, str]) -> Any:
    """Fill in variables as compose does, for the forms that the file uses."""
    if isinstance(value, dict):
        return {key: interpolate(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, variables) for item in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if kind == "?":
            raise Refused(rest)
        return rest or ""

    return VARIABLE.sub(fill, value)


def example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


@pytest.fixture
def services() -> dict[str, Any]:
    """The services with the example's variables and the passwords filled in."""
    raw = yaml.safe_load(COMPOSE_TEXT)["services"]
    filled: dict[str, Any] = interpolate(raw, {**example(), **PASSWORDS})
    return filled


def test_the_services_and_their_profiles(services: dict[str, Any]) -> None:
    assert {name: service.get("profiles") for name, service in services.items()} == {
        "redis": None,
        "verify": ["cpu"],
        "verify-gpu": ["gpu"],
        "draft": None,
        "flower": None,
    }


def test_every_published_port_is_on_loopback(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:5555:5555", "127.0.0.1:6379:6379"]
    assert not any(service.get("network_mode") for service in services.values())


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_service_has_nothing_that_only_one_can_have(
    name: str, services: dict[str, Any]
) -> None:
    assert services[name].keys().isdisjoint({"container_name", "hostname", "ports", "expose"})


def test_every_service_is_bounded_watched_and_not_root(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert not service["user"].startswith(("0", "root")), name
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}, name
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"], name


def test_the_commands_are_the_ones_that_run_without_containers(services: dict[str, Any]) -> None:
    assert services["verify"]["command"] == ["pilotfish", "worker", "verify"]
    assert services["verify-gpu"]["command"] == ["pilotfish", "worker", "verify"]
    assert services["draft"]["command"] == ["pilotfish", "worker", "draft"]
    assert services["flower"]["command"][:4] == [
        "celery",
        "--app",
        "pilotfish_workers.verify.app",
        "flower",
    ]


def ask_for_help(words: list[str]) -> int:
    code = "from pilotfish.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, check=False
    )
    return done.returncode


@pytest.mark.parametrize("name", WORKERS)
def test_the_command_line_knows_each_word(name: str, services: dict[str, Any]) -> None:
    words = services[name]["command"][1:]
    assert ask_for_help(words) == 0
    assert ask_for_help([*words[:-1], "nonsense"]) != 0


@pytest.mark.parametrize("name", [*WORKERS, "flower"])
def test_the_settings_are_complete_and_usable(name: str, services: dict[str, Any]) -> None:
    environ = {key: str(value) for key, value in services[name]["environment"].items()}
    expected = CONTRACT if name != "flower" else CONTRACT - {"PILOTFISH_THREADS"}
    assert {key for key in environ if key.startswith("PILOTFISH_")} == expected
    settings = Settings.from_env(environ)
    assert settings.served_name == "SmolLM2-135M-Instruct"
    assert settings.broker_url == settings.data_url == "redis://:hush@redis:6379/0"


def test_only_the_gpu_service_asks_for_a_device(services: dict[str, Any]) -> None:
    devices = {
        name: service["environment"]["PILOTFISH_DEVICE"]
        for name, service in services.items()
        if name in WORKERS
    }
    assert devices == {"verify": "cpu", "verify-gpu": "cuda", "draft": "cpu"}
    reservation = services["verify-gpu"]["deploy"]["resources"]["reservations"]["devices"][0]
    assert reservation["capabilities"] == ["gpu"]
    assert "reservations" not in services["verify"]["deploy"]["resources"]
    assert services["verify-gpu"]["image"] != services["verify"]["image"]
    assert "TORCH_INDEX" in services["verify-gpu"]["build"]["args"]


@pytest.mark.parametrize("name", PASSWORDS)
def test_without_a_password_nothing_starts(name: str) -> None:
    raw = yaml.safe_load(COMPOSE_TEXT)["services"]
    with pytest.raises(Refused, match=name):
        interpolate(raw, {**example(), **PASSWORDS, name: ""})


def test_no_password_stands_in_a_command_line(services: dict[str, Any]) -> None:
    for name, service in services.items():
        words = [*service["command"], *service["healthcheck"]["test"]]
        assert not any(secret in word for word in words for secret in PASSWORDS.values()), name


def test_the_server_and_its_health_check_use_the_password(services: dict[str, Any]) -> None:
    redis = services["redis"]
    assert redis["environment"] == {"REDISCLI_AUTH": "hush"}
    assert "requirepass $$REDISCLI_AUTH" in redis["command"][-1]
    assert redis["healthcheck"]["test"] == ["CMD", "valkey-cli", "-e", "ping"]
    assert "protected-mode" not in redis["command"][-1]  # as in the file: on


def test_flower_sees_no_variable_that_it_would_take_for_an_option(
    services: dict[str, Any],
) -> None:
    environ = services["flower"]["environment"]
    assert [key for key in environ if key.startswith("FLOWER_")] == ["FLOWER_BASIC_AUTH"]
    assert environ["FLOWER_BASIC_AUTH"] == "pilotfish:secret"
    assert "env_file" not in services["flower"]


def test_the_example_lists_exactly_the_variables_in_use() -> None:
    assert set(example()) == {match[1] for match in VARIABLE.finditer(COMPOSE_TEXT)}


def test_data_and_models_outlive_the_containers(services: dict[str, Any]) -> None:
    volumes = yaml.safe_load(COMPOSE_TEXT)["volumes"]
    named = {
        mount.partition(":")[0]
        for service in services.values()
        for mount in service["volumes"]
        if not mount.startswith(".")
    }
    assert named == set(volumes) == {"redis-data", "models", "flower-data"}
    for name in WORKERS:
        target = services[name]["environment"]["PILOTFISH_CACHE"]
        assert services[name]["volumes"] == [f"models:{target}"]
        assert target in DOCKERFILE


def test_the_server_reads_the_shipped_configuration(services: dict[str, Any]) -> None:
    redis = services["redis"]
    source, target, mode = redis["volumes"][1].split(":")
    assert (ROOT / source).is_file()
    assert f"valkey-server {target} " in redis["command"][-1]
    assert mode == "ro"


def stages() -> dict[str, str]:
    parts = re.split(r"^FROM \S+ AS (\w+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_image_is_built_in_two_stages_and_runs_without_root(services: dict[str, Any]) -> None:
    assert list(stages()) == ["build", "runtime"]
    users = re.findall(r"^USER (\S+)$", stages()["runtime"], re.MULTILINE)
    assert users == [services["verify"]["user"]]
    assert "--from=build" in stages()["runtime"]
    assert "pip install" not in stages()["runtime"]


def test_the_image_takes_the_cpu_build_of_torch_unless_told() -> None:
    assert re.search(r"^ARG TORCH_INDEX=\S+/whl/cpu$", stages()["build"], re.MULTILINE)


def test_the_image_copies_files_that_exist_and_are_not_ignored(services: dict[str, Any]) -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    assert {"pyproject.toml", "README.md", "LICENSE", "broker_config", "workers"} <= allowed
    copied = re.findall(r"^COPY ((?:broker_config/\S+ )+)", stages()["runtime"], re.MULTILINE)
    names = [Path(item).name for line in copied for item in line.split()]
    assert all((ROOT / item).is_file() for line in copied for item in line.split())
    used = [word for service in services.values() for word in _words(service)]
    in_image = {Path(word).name for word in used if "/opt/pilotfish/" in word}
    assert in_image == set(names)


def _words(service: dict[str, Any]) -> list[str]:
    return [*service["command"], *service["healthcheck"]["test"]]


def test_the_build_uses_that_dockerfile(services: dict[str, Any]) -> None:
    for name in (*WORKERS, "flower"):
        assert services[name]["build"]["dockerfile"] == "workers/Dockerfile", name
