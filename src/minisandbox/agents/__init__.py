"""Agents that solve tasks in a sandbox, their actions, and the session that records their work."""

from minisandbox.agents.actions import (
    Action,
    Bash,
    Create,
    Edit,
    FormatError,
    Insert,
    StrReplace,
    Submit,
    View,
)
from minisandbox.agents.baselines import EmptyAgent, OracleAgent
from minisandbox.agents.bash import BashAgent
from minisandbox.agents.command import AgentFailed, AgentRecipe, CommandAgent, load_recipe, recipe_names
from minisandbox.agents.formats import FORMATS, ActionFormat
from minisandbox.agents.options import AgentOptions
from minisandbox.agents.record import Record, Step, Turn, TurnPatch
from minisandbox.agents.registry import AGENTS, open_agent
from minisandbox.agents.replay import InShell, ReplayAgent
from minisandbox.agents.session import (
    EXIT_ERROR,
    EXIT_FORMAT,
    SUBMITTED,
    Agent,
    AgentLimits,
    Ending,
    LimitReached,
    Session,
)

__all__ = [
    "AGENTS",
    "EXIT_ERROR",
    "EXIT_FORMAT",
    "FORMATS",
    "SUBMITTED",
    "Action",
    "ActionFormat",
    "Agent",
    "AgentFailed",
    "AgentLimits",
    "AgentOptions",
    "AgentRecipe",
    "Bash",
    "BashAgent",
    "CommandAgent",
    "Create",
    "Edit",
    "EmptyAgent",
    "Ending",
    "FormatError",
    "InShell",
    "Insert",
    "LimitReached",
    "OracleAgent",
    "Record",
    "ReplayAgent",
    "Session",
    "Step",
    "StrReplace",
    "Submit",
    "Turn",
    "TurnPatch",
    "View",
    "load_recipe",
    "open_agent",
    "recipe_names",
]
