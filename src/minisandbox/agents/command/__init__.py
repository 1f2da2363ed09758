"""Run the command line of an existing agent in a sandbox, against the capture proxy."""

from minisandbox.agents.command.agent import AgentFailed, CommandAgent
from minisandbox.agents.command.recipe import AgentRecipe, load_recipe, recipe_names

__all__ = ["AgentFailed", "AgentRecipe", "CommandAgent", "load_recipe", "recipe_names"]
