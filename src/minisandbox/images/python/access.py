"""The network settings of a build step: variables and mounts while it runs, nothing that stays."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from minisandbox.errors import BuildError
from minisandbox.images.places import MOUNTS
from minisandbox.images.python.index import IndexSettings, shown
from minisandbox.types import Mount, Network

_QUIET = {
    "PIP_CACHE_DIR": "/tmp/build/pip-cache",  # noqa: S108 - in the sandbox, gone with it
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_ROOT_USER_ACTION": "ignore",
    # On the file system of the environment, so that uv links what it unpacked; gone with the step.
    "UV_CACHE_DIR": "/var/tmp/uv-cache",  # noqa: S108 - in the sandbox
    "UV_LINK_MODE": "hardlink",
    "UV_NO_CONFIG": "1",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_DOWNLOADS": "never",
}


@dataclass(frozen=True, slots=True)
class Access:
    """What a networked step gets.

    Attributes:
        network: what it reaches.
        environment: variables for its commands.
        mounts: the certificates, where it reaches the host's own network.
    """

    network: Network
    environment: dict[str, str]
    mounts: tuple[Mount, ...] = ()


def index_access(url: str) -> Access:
    """The package index and nothing else, through the proxy of sandboxes.

    Args:
        url: our own index's address on the host's loopback.
    """
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), "")  # the sandbox's own loopback has no index
    return Access(Network.allow(urlsplit(url).netloc, private=True), {**_index_variables(url), **direct})


def host_access(url: str | None, settings: IndexSettings, step: str) -> Access:
    """The host's own network, with its proxies and certificates; packages come from our own index all the same.

    Args:
        url: our own index's address on the host's loopback; None for no index of ours.
        settings: the host's.
        step: the step's name, for errors.

    Raises:
        BuildError: a proxy's address holds credentials, which must not get into a sandbox.
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
        return Access(Network.host(), variables)
    bundle = MOUNTS / "certificates.pem"
    names = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO")
    mount = Mount(settings.cert.resolve(), bundle)
    return Access(Network.host(), {**variables, **dict.fromkeys(names, str(bundle))}, (mount,))


def _index_variables(url: str) -> dict[str, str]:
    # An index on the loopback answers when the one beyond has; that one's own time-out counts there.
    return {
        **_QUIET,
        "PIP_INDEX_URL": url,
        "PIP_DEFAULT_TIMEOUT": "600",
        "UV_DEFAULT_INDEX": url,
        "UV_HTTP_TIMEOUT": "600",
    }
