"""Agents: the loops that work on tasks. These need no model."""

from minisandbox.agents.empty import EmptyAgent
from minisandbox.agents.oracle import OracleAgent
from minisandbox.agents.protocol import EXIT_ERROR, SUBMITTED, Agent, AgentResult, Step, perform
from minisandbox.agents.replay import ReplayAgent

__all__ = [
    "EXIT_ERROR",
    "SUBMITTED",
    "Agent",
    "AgentResult",
    "EmptyAgent",
    "OracleAgent",
    "ReplayAgent",
    "Step",
    "perform",
]
