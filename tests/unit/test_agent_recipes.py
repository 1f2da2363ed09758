"""Recipes of command-line agents: the bundled ones, files, and what is malformed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from minisandbox.agents import AgentRecipe, CommandAgent, load_recipe, open_agent, recipe_names
from minisandbox.agents.command.agent import fill
from minisandbox.errors import InvalidValue, NotFound

TABLE = {"format": 1, "name": "own", "version": "2", "command": ["own", "{message}"], "environment": {"KEY": "{key}"}}


@pytest.mark.parametrize("name", recipe_names())
def test_a_bundled_recipe_pins_its_version(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert all(recipe.version in package for package in (*recipe.npm, *recipe.python))
    assert any("{key}" in text for text in recipe.environment.values())
    agent = open_agent(f"command:{name}")
    assert isinstance(agent, CommandAgent)
    assert (agent.name, agent.needs_model) == (name, True)


def test_a_file_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(TABLE))
    recipe = load_recipe(str(path))
    assert recipe == AgentRecipe("own", "2", ("own", "{message}"), environment={"KEY": "{key}"})
    assert recipe.image() is None
    text = 'format = 1\nname = "own"\nversion = "2"\ncommand = ["own"]\nstdin = "message"\n'
    (tmp_path / "own.toml").write_text(text)
    assert load_recipe(str(tmp_path / "own.toml")).stdin == "message"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is not a recipe"),
        ({"comand": ["x"]}, "unknown field 'comand'"),
        ({"command": "own {message}"}, "command is"),
        ({"command": []}, "command is empty"),
        ({"command": ["own"]}, "no part has the task's message"),
        ({"environment": {"A": 1}}, "environment is"),
        ({"api": "gemini"}, "api is 'gemini'"),
        ({"npm": ["left-pad"]}, "is not an npm package with a version"),
        ({"python": ["-r x"]}, "is not a requirement"),
        ({"idle": 0}, "idle is 0"),
        ({"version": None}, "version is None"),
    ],
)  # fmt: skip
def test_a_malformed_recipe_is_refused_with_its_file(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(TABLE | change))
    with pytest.raises(InvalidValue, match=message) as error:
        load_recipe(str(path))
    assert "own.yaml" in str(error.value)


@pytest.mark.parametrize("name", ["nobody", "missing.toml"])
def test_a_missing_recipe_is_named(name: str) -> None:
    with pytest.raises(NotFound, match=name):
        open_agent(f"command:{name}")


def test_words_are_replaced_once() -> None:
    words = {"message": "say {key} and {other}", "key": "secret"}
    assert fill("{message}: {key} {unknown} {}", words) == "say {key} and {other}: secret {unknown} {}"
