"""Reporters: what tells us, from inside a grading sandbox, what a test runner says of each test."""

from __future__ import annotations

import enum
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minisandbox.grade.policy import import_roots
from minisandbox.sandbox import Sandbox

_INSIDE = Path(__file__).with_name("inside")


class Kind(enum.Enum):
    """Which runner a reporter belongs to, by the file that it is."""

    PYTEST = "report_plugin"
    """A plugin that is named on pytest's command line, and loaded when the interpreter starts."""

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
        """Return one with a random name and place."""
        module = f"report_{secrets.token_hex(6)}" if kind is Kind.PYTEST else "sitecustomize"
        return cls(kind, f"/run/{secrets.token_hex(6)}", module)

    def install(self, box: Sandbox) -> None:
        """Put it into a sandbox; before a submission is, so that a full disk cannot keep it out.

        It is written, not mounted: the host's file may be readable to its owner only.

        Raises:
            FileAccessError: it cannot be written.
            SandboxGone: the sandbox has ended.
        """
        files = {self.kind.value: self.module, "report_lines": f"{self.module}_lines"}
        if self.kind is Kind.PYTEST:
            files["early_start"] = "sitecustomize"
            box.files.write_bytes(f"{self.directory}/repository", _repository(box), mode=0o444)
        for source, name in files.items():
            data = (_INSIDE / f"{source}.py").read_bytes()
            box.files.write_bytes(f"{self.directory}/{name}.py", data, mode=0o444)

    def environment(self, box: Sandbox) -> Mapping[str, str]:
        """Return the variables under which the test command finds it."""
        known = dict(box.image.environment).get("PYTHONPATH")
        return {"PYTHONPATH": f"{known}:{self.directory}" if known else self.directory}


_SUFFIX = re.compile(rb"(?:/__init__)?\.[^/]*$")
_MODULES = """shopt -s nullglob
for place; do printf '%s\\n' "$place"/{*.py,*.so,*/__init__.py}; done"""


def _repository(box: Sandbox) -> bytes:
    """Return the repository's directory and, a line each, the modules that its image has in it, without suffixes."""
    places = sorted(import_roots(dict(box.image.environment), box.image.workdir))
    command = ["bash", "-c", _MODULES, "modules", *(place or "." for place in places)]
    files = box.exec(command, timeout=60.0).stdout_bytes.splitlines()
    modules = {_SUFFIX.sub(b"", file.removeprefix(b"./")) for file in files if file}
    return b"\n".join((os.fsencode(box.image.workdir), *sorted(modules)))
