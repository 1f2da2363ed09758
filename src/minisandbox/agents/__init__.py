"""Agents: the loops that work on tasks."""

from minisandbox.agents.empty import EmptyAgent
from minisandbox.agents.oracle import OracleAgent
from minisandbox.agents.protocol import EXIT_ERROR, EXIT_FORMAT, SUBMITTED, Agent, Ending
from minisandbox.agents.replay import ReplayAgent
from minisandbox.agents.session import AgentLimits, LimitReached, Record, Session, Step, Turn

__all__ = [
    "EXIT_ERROR",
    "EXIT_FORMAT",
    "SUBMITTED",
    "Agent",
    "AgentLimits",
    "EmptyAgent",
    "Ending",
    "LimitReached",
    "OracleAgent",
    "Record",
    "ReplayAgent",
    "Session",
    "Step",
    "Turn",
]
