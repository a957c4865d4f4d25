"""Settings come from variables and keywords, and a bad value names its variable."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from pilotfish_broker.errors import ConfigError
from pilotfish_broker.settings import Settings

BAD = {
    "broker_url": [
        "http://x",
        "localhost:6379",
        "redis://h:port",
        "redis://h:1/x",
        "redis://h/0/1",
    ],
    "data_url": ["ftp://x"],
    "namespace": ["a b", "a:b", "x" * 33],
    "model": ["a/b", ".hidden", "x" * 129],
    "dtype": ["float64", "fp16"],
    "device": ["gpu", "cuda:", "cuda:x"],
    "threads": ["-1", "many", "1.5"],
    "slots": ["0", "1025", "x"],
    "speculation": ["0", "17", "on", "-1"],
    "kv_tokens": ["-1", "x"],
    "prefill_tokens": ["15", "x"],
    "hang_seconds": ["soon", "0.5", "86401", "nan"],
    "lease_seconds": ["0", "nan", "inf", "soon"],
    "max_attempts": ["0", "x"],
    "result_ttl_seconds": ["0", "-1", "nan"],
    "inbox_frames": ["1", "x"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, all_ in BAD.items() for v in all_])
def test_a_bad_value_names_its_variable_whether_it_came_by_environment_or_keyword(
    name: str, value: str
) -> None:
    variable = f"PILOTFISH_{name.upper()}"
    with pytest.raises(ConfigError, match=variable):
        Settings.from_env({variable: value})
    with pytest.raises(ConfigError, match=variable):
        Settings.from_env({}, **{name: value})


def test_every_setting_with_a_restricted_form_is_in_the_table_of_bad_values() -> None:
    unrestricted = {"target", "draft"}
    assert {item.name for item in fields(Settings)} - unrestricted == set(BAD)


def test_a_keyword_wins_over_the_environment_and_none_means_not_given() -> None:
    environ = {"PILOTFISH_SLOTS": "3", "PILOTFISH_THREADS": "2"}
    assert Settings.from_env(environ, slots=5).slots == 5
    assert Settings.from_env(environ, slots=None).slots == 3
    assert Settings.from_env(environ, slots=5).threads == 2


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_env({"PILOTFISH_SLOTS": "", "PILOTFISH_DATA_URL": ""}) == Settings()


def test_a_keyword_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="no setting named slotz"):
        Settings.from_env({}, slotz=1)


def test_foreign_variables_are_left_alone() -> None:
    assert Settings.from_env({"PATH": "/", "PILOTFISHY": "1"}) == Settings()


@pytest.mark.parametrize("speculation", ["auto", "off", 1, 16])
def test_as_env_builds_the_same_settings_in_another_process(speculation: str | int) -> None:
    settings = Settings.from_env(
        {},
        broker_url="redis://:pw@h:1/2",
        data_url="unix:///tmp/s",
        target="org/Model-1",
        draft="off",
        device="cuda:1",
        slots=7,
        lease_seconds=2.5,
        speculation=speculation,
    )
    assert Settings.from_env(settings.as_env()) == settings
    assert Settings.from_env(settings.as_env()).speculation == speculation


def test_defaults_survive_the_round_trip_through_the_environment() -> None:
    assert Settings.from_env(Settings().as_env()) == Settings()


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@h",
        "user:hunter2@h",
        "http://h?password=hunter2",
        "redis://:hunter2@h:x",
    ],
)
def test_the_password_of_a_refused_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="PILOTFISH_BROKER_URL") as caught:
        Settings.from_env({"PILOTFISH_BROKER_URL": url})
    assert "hunter2" not in str(caught.value)
    assert "user" not in str(caught.value)


def test_no_password_is_shown_where_settings_are_printed() -> None:
    url = "redis://:hunter2@host:6379/0"
    settings = Settings.from_env({}, broker_url=url, data_url=url)
    assert "hunter2" not in repr(settings)
    assert settings.as_env()["PILOTFISH_BROKER_URL"] == url
    assert "namespace='pf'" in repr(settings)


def test_the_data_plane_is_the_broker_unless_it_has_a_url_of_its_own() -> None:
    assert Settings(broker_url="redis://a").redis_url == "redis://a"
    assert Settings(broker_url="redis://a", data_url="redis://b").redis_url == "redis://b"


@pytest.mark.parametrize(
    ("target", "model", "name"),
    [
        ("org/SmolLM2-135M", None, "SmolLM2-135M"),
        ("/models/tiny/", None, "tiny"),
        ("tiny", None, "tiny"),
        ("/models/tiny", "served", "served"),
        (None, "served", "served"),
    ],
)
def test_the_served_name_is_the_model_or_else_the_last_part_of_the_target(
    target: str | None, model: str | None, name: str
) -> None:
    assert Settings(target=target, model=model).served_name == name


@pytest.mark.parametrize(
    ("target", "variable"), [(None, "PILOTFISH_MODEL"), ("/models/a b", "PILOTFISH_TARGET")]
)
def test_a_missing_or_unusable_served_name_says_which_variable_to_set(
    target: str | None, variable: str
) -> None:
    with pytest.raises(ConfigError, match=variable):
        _ = Settings(target=target).served_name


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings().slots = 3  # type: ignore[misc]
