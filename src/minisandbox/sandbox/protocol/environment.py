"""Build the environment variables of commands from fixed defaults, never from the host's environment."""

from __future__ import annotations

from collections.abc import Mapping

from minisandbox.launch.setup import PROXY_PORT
from minisandbox.types import ImageSpec, Network

DEFAULTS: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    # nothing may wait for user input: no pager, no editor, no prompt
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


_PROXY = {
    "http_proxy": f"http://127.0.0.1:{PROXY_PORT}",
    "https_proxy": f"http://127.0.0.1:{PROXY_PORT}",
    "no_proxy": "localhost,127.0.0.1,::1",
}


def network_environment(network: Network) -> dict[str, str]:
    """Return the variables that point programs to the network proxy, in both spellings, or {} without a proxy."""
    if network.mode != "allow":
        return {}
    return {spelling: value for name, value in _PROXY.items() for spelling in (name, name.upper())}


def command_environment(image: ImageSpec, *layers: Mapping[str, str] | None) -> dict[str, str]:
    """Return a command's environment: the defaults, then the image's variables, then the caller's; later ones win."""
    environment = dict(DEFAULTS)
    environment.update(image.environment)
    for layer in layers:
        environment.update(layer or {})
    return environment
