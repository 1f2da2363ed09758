"""Define the options of grading once for the command line, configuration files and the documentation."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from minisandbox.errors import InvalidValue

ONCE = "once"
"""Confirm every pass by one run of the FAIL_TO_PASS tests, and a pass with a suspicious flag by two."""
ALWAYS = "always"
"""Confirm every pass by two runs of all tests."""
NEVER = "share(0)"
"""Confirm only passes with a suspicious flag."""

_SHARE = re.compile(r"share\((\d+(?:\.\d*)?|\.\d+)\)")


@dataclass(frozen=True, slots=True)
class GradingOptions:
    """Options of grading submissions.

    Attributes:
        timeout: the time limit in seconds of one run of a task's tests; None for the task's own.
        confirm: how passes are confirmed by further runs: ``once``, ``always`` or ``share(P)``.
    """

    timeout: float | None = field(
        default=None,
        metadata={"metavar": "SECONDS", "help": "time limit of one run of a task's tests; without: the task's own"},
    )
    confirm: str = field(
        default=ONCE,
        metadata={
            "metavar": "POLICY",
            "help": "how passes are confirmed: once: by one further run of the FAIL_TO_PASS tests, passes with a "
            "suspicious flag by two; always: by two further runs of all tests; share(P): as once, but only passes with "
            "a suspicious flag, and the share P of the others",
        },
    )

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidValue(f"timeout is {self.timeout!r}", hint="give a number of seconds above 0")
        confirmed_share(self.confirm)


def confirmed_share(policy: str) -> float:
    """Return the share of passes without a suspicious flag that a policy confirms.

    Args:
        policy: ``once``, ``always`` or ``share(P)``.

    Raises:
        InvalidValue: the policy is unknown, or P is above 1.
    """
    if policy in (ONCE, ALWAYS):
        return 1.0
    match = _SHARE.fullmatch(policy)
    if match is None or float(match[1]) > 1:
        raise InvalidValue(
            f"confirm is {policy!r}", hint=f"give {ONCE}, {ALWAYS}, or a share from 0 to 1 such as share(0.1)"
        )
    return float(match[1])


def recorded_policy(policy: str) -> dict[str, str]:
    """Return a policy's part of a run's configuration; empty for ``always``, which older runs did not record."""
    return {} if policy == ALWAYS else {"confirm": policy}


def is_confirmed(policy: str, *, flagged: bool) -> bool:
    """Decide at random whether to confirm a pass, so that a submission cannot foresee the decision.

    Args:
        policy: as for :func:`confirmed_share`.
        flagged: whether the pass has a suspicious flag.

    Raises:
        InvalidValue: the policy is invalid.
    """
    share = confirmed_share(policy)
    return flagged or random.SystemRandom().random() < share
