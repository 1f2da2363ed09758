"""Reporters: what tells us, from inside a grading sandbox, what a test runner says of each test."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.sandbox import Sandbox

_INSIDE = Path(__file__).with_name("inside")


class Kind(enum.Enum):
    """Which runner a reporter belongs to, by the file that it is."""

    PYTEST = "report_plugin"
    """A plugin that is named on pytest's command line."""

    OTHER = "runner_hook"
    """What the interpreter of the test command imports when it starts: for unittest's, Django's and SymPy's runners."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """One reporter in one sandbox.

    Attributes:
        kind: which.
        directory: where it lies inside.
        module: its name.
    """

    kind: Kind
    directory: str
    module: str

    @classmethod
    def make(cls, kind: Kind) -> Reporter:
        """Return one with a name and a place that nobody knows."""
        module = f"report_{secrets.token_hex(6)}" if kind is Kind.PYTEST else "sitecustomize"
        return cls(kind, f"/run/{secrets.token_hex(6)}", module)

    def install(self, box: Sandbox) -> None:
        """Put it into a sandbox; before a submission is, so that a full disk cannot keep it out.

        It is written, not mounted: the host's file may be readable to its owner only.

        Raises:
            FileAccessError: it cannot be written.
            SandboxGone: the sandbox has ended.
        """
        for source, name in ((self.kind.value, self.module), ("report_lines", f"{self.module}_lines")):
            data = (_INSIDE / f"{source}.py").read_bytes()
            box.files.write_bytes(f"{self.directory}/{name}.py", data, mode=0o444)

    def environment(self, box: Sandbox) -> Mapping[str, str]:
        """Return the variables under which the test command finds it."""
        known = dict(box.image.environment).get("PYTHONPATH")
        return {"PYTHONPATH": f"{known}:{self.directory}" if known else self.directory}
