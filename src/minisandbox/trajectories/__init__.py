"""Records of rollouts (trajectories), and their conversion to training data and other programs' formats."""

from minisandbox.trajectories.trajectory import (
    VERSION,
    Failure,
    PatchRecord,
    StepRecord,
    Timings,
    Trajectory,
    TurnRecord,
)

__all__ = ["VERSION", "Failure", "PatchRecord", "StepRecord", "Timings", "Trajectory", "TurnRecord"]
