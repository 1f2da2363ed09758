"""Memory bombs, one after the other in the same sandbox: each is ended and named, and the sandbox lives on.

MINISANDBOX_TEST_BOMBS sets their number: whom the kernel's OOM killer takes depends on how processes are scheduled.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter

import pytest

from minisandbox.errors import SandboxGone
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel

BOMBS = int(os.environ.get("MINISANDBOX_TEST_BOMBS", "4"))
SEVERAL = "for _ in 1 2 3 4 5 6; do tail /dev/zero & done; wait -n; kill $(jobs -p); wait"
"""tail(1) keeps all of a line. When memory runs out, each of the six holds less than a supervisor of ours."""
LIMITS = Limits(memory="64M")
OUT_OF_MEMORY = "memory exhausted"
"""tail's own error: without control groups RLIMIT_DATA bounds each process, maybe before the watchdog looks."""


def test_memory_bombs_end_and_their_sandbox_lives(spec: ImageSpec) -> None:
    ends: Counter[object] = Counter()
    with contextlib.ExitStack() as boxes:
        box = boxes.enter_context(Sandbox.create(spec, limits=LIMITS))
        for _ in range(BOMBS):
            try:
                result = box.exec(SEVERAL, timeout=120)
                ends["named" if "memory" in result.limits_hit or OUT_OF_MEMORY in result.stderr else "not named"] += 1
            except SandboxGone:
                ends[SandboxGone] += 1
                box = boxes.enter_context(Sandbox.create(spec, limits=LIMITS))
    print(f"{BOMBS} memory bombs ended as {dict(ends)}")
    assert ends == {"named": BOMBS}
