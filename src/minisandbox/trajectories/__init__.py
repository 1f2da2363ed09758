"""Trajectories: the durable records of rollouts."""

from minisandbox.trajectories.records import Failure, StepRecord, Timings, TurnRecord
from minisandbox.trajectories.trajectory import VERSION, Trajectory

__all__ = ["VERSION", "Failure", "StepRecord", "Timings", "Trajectory", "TurnRecord"]
