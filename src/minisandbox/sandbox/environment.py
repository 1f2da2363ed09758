"""What commands find in their environment: an allow-list of our own, never the host's."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.types import ImageSpec

DEFAULTS: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    # nothing may wait for a person: no pager, no editor, no question
    "PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_PAGER": "cat",
    "LESS": "-FRX",
    "EDITOR": "true",
    "VISUAL": "true",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_PROGRESS_BAR": "off",
    "PYTHONUNBUFFERED": "1",
}


def command_environment(image: ImageSpec, *layers: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a command: the defaults, the image's captured variables, then the caller's, later ones win."""
    merged = dict(DEFAULTS)
    merged.update(image.environment)
    for layer in layers:
        merged.update(layer or {})
    return merged
