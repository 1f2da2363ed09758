"""Configure the network access of build steps: package index, proxies and certificates of the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from minisandbox import certificates
from minisandbox.errors import BuildError, HostError, ProgramNotFound
from minisandbox.images.scripts import MOUNTS
from minisandbox.index_settings import IndexSettings, host_settings
from minisandbox.spec import shown
from minisandbox.types import Mount, Network

_UV_TIMEOUT = 30.0
_USER = re.compile(r"^([^/?#]*://)[^/?#]*@")
_FIND_LOCK = threading.Lock()
"""Lock for ``find_uv_bin``, which reads sysconfig and is not thread-safe: variables may be half initialised."""
_QUIET = {
    "PIP_CACHE_DIR": "/tmp/build/pip-cache",  # noqa: S108 - in the sandbox, removed with it
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_ROOT_USER_ACTION": "ignore",
    # On the file system of the environment, so that uv can hard-link files; removed at the end of the step.
    "UV_CACHE_DIR": "/var/tmp/uv-cache",  # noqa: S108 - in the sandbox
    "UV_LINK_MODE": "hardlink",
    "UV_NO_CONFIG": "1",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_DOWNLOADS": "never",
}


def index_settings() -> IndexSettings:
    """Return the host's package index settings, with uv's default index if they name none.

    Raises:
        HostError: uv does not print its default index.
        ProgramNotFound: there is no uv.
    """
    settings = host_settings()
    if settings.index_url or settings.no_index:
        return settings
    return replace(settings, index_url=default_index_url())


def default_index_url() -> str:
    """Run uv to find its default index.

    Raises:
        HostError: uv does not print its default index.
        ProgramNotFound: there is no uv.
    """
    options = ("--quiet", "--no-header", "--emit-index-url", "--no-config", "--no-cache")  # home may be read-only
    command = [str(find_uv()), "pip", "compile", *options, "--python", sys.executable, "-"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    try:
        process = subprocess.run(
            command,
            input="",
            capture_output=True,
            text=True,
            env=environment,
            timeout=_UV_TIMEOUT,
            cwd="/",
            check=False,
        )
        message = process.stderr
        if match := re.search(r"^--index-url (\S+)$", process.stdout, re.MULTILINE):
            return match[1]
    except (OSError, subprocess.SubprocessError) as error:
        message = str(error)
    raise HostError("uv does not say which package index it uses", reason=message.strip(), hint="set PIP_INDEX_URL")


def without_credentials(url: str) -> str:
    """Return a URL without its credentials, for requests. For messages use :func:`shown`."""
    return _USER.sub(r"\1", url)


def find_uv() -> Path:
    """Return the path of the uv program with links resolved.

    Raises:
        ProgramNotFound: the package ``uv`` is installed without its program.
    """
    import uv  # noqa: PLC0415 - most commands do not need uv

    try:
        with _FIND_LOCK:
            return Path(uv.find_uv_bin()).resolve(strict=True)
    except OSError as error:
        raise ProgramNotFound(
            "there is no uv program",
            reason=f"the Python package uv was installed without it: {error}",
            hint="pip install --force-reinstall uv",
        ) from error


@dataclass(frozen=True, slots=True)
class StepAccess:
    """The network of a step, with the variables and mounts that its commands need to use the network.

    Attributes:
        network: the network.
        environment: variables for the commands.
        mounts: the certificates, if the step uses the host's network.
    """

    network: Network
    environment: dict[str, str]
    mounts: tuple[Mount, ...] = ()


def index_access(url: str) -> StepAccess:
    """Return access to the package index alone, through the sandbox's network proxy.

    Args:
        url: the URL of MiniSandbox's own index on the host's loopback.
    """
    # Never bypass the proxy, because the sandbox's own loopback does not reach the index.
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), "")
    return StepAccess(Network.allow(urlsplit(url).netloc, private=True), {**_index_variables(url), **direct})


def host_access(url: str | None, settings: IndexSettings, step: str) -> StepAccess:
    """Return access to the host's network, with its proxies and certificates; packages come from MiniSandbox's index.

    Args:
        url: the URL of MiniSandbox's own index on the host's loopback; None for no index.
        settings: the host's package index settings.
        step: the step's name, for errors.

    Raises:
        BuildError: a proxy's URL contains credentials, which must not enter a sandbox.
    """
    for name, value in settings.proxies:
        if name != "no_proxy" and "@" in value:
            raise BuildError(
                f"build step {step!r}: the address of the proxy {shown(value)!r} holds credentials",
                step=step,
                reason="code of packages runs in build steps and could read them",
                hint="let the recipe's network be 'index', or use a proxy on this machine that adds them",
            )
    proxies = dict(settings.proxies)
    proxies["no_proxy"] = ",".join(filter(None, (proxies.get("no_proxy", ""), "127.0.0.1")))
    variables = {**({} if url is None else _index_variables(url)), **proxies}
    if settings.cert is None:
        return StepAccess(Network.host(), variables)
    mount = Mount(settings.cert.resolve(), MOUNTS / "certificates.pem")
    return StepAccess(Network.host(), {**variables, **certificates.variables(mount.target)}, (mount,))


def _index_variables(url: str) -> dict[str, str]:
    # Use long timeouts, because MiniSandbox's index waits for the configured index, which has its own timeout.
    return {
        **_QUIET,
        "PIP_INDEX_URL": url,
        "PIP_DEFAULT_TIMEOUT": "600",
        "UV_DEFAULT_INDEX": url,
        "UV_HTTP_TIMEOUT": "600",
    }
