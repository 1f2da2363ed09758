"""Trajectories: the durable records of rollouts."""

from minisandbox.trajectories.trajectory import VERSION, Failure, StepRecord, Timings, Trajectory, TurnRecord

__all__ = ["VERSION", "Failure", "StepRecord", "Timings", "Trajectory", "TurnRecord"]
