"""The package index settings of this host, read and never changed; and what a build step gets of them."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minisandbox.errors import BuildError, HostError, InvalidValue, ProgramNotFound
from minisandbox.images.places import MOUNTS
from minisandbox.store.disk.paths import home_directory
from minisandbox.types import Mount, Network

_SECTIONS = ("global", "download", "install")
_TRUE = frozenset({"1", "true", "yes", "on"})
_NUMBER = re.compile(r"\d{1,9}(?:\.\d*)?")
_UV_TIMEOUT = 30.0
_NAME = re.compile(r"^[\w.-]+=")
"""What UV_INDEX and UV_DEFAULT_INDEX may have before an address."""
_USER = re.compile(r"^([^/?#]*://)[^/?#]*@")
_USER_OR_LOGIN = re.compile(r"^([^/?#]*://)?[^/?#]*@")
_FINDING = threading.Lock()
"""It asks sysconfig, which answers a second thread with half of what it is about to know."""
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
class IndexSettings:
    """Where packages come from.

    Attributes:
        index_url: the main index, or None for the tools' own default.
        extra_index_urls: further indexes; ``file://`` is one too.
        find_links: directories, pages and archives with links to packages.
        no_index: whether indexes are off, so that only ``find_links`` counts.
        cert: a bundle of certificates to trust, or None for the system's.
        trusted_hosts: hosts whose certificates are not checked.
        proxies: (variable, value) pairs such as ``("https_proxy", "...")``.
        timeout: seconds to wait for a server.
    """

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: Path | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxies: tuple[tuple[str, str], ...] = ()
    timeout: float = 60.0

    @property
    def indexes(self) -> tuple[str, ...]:
        """The configured indexes, in the order in which they are asked; without the tools' default."""
        return () if self.no_index else tuple(filter(None, (self.index_url, *self.extra_index_urls)))

    @property
    def urls(self) -> tuple[str, ...]:
        """Every configured index and page."""
        return (*self.indexes, *self.find_links)


def host_settings(environment: Mapping[str, str] | None = None) -> IndexSettings:
    """Read the settings of pip (files, then environment) and of uv where pip has none.

    Args:
        environment: the process's own by default.
    """
    env = os.environ if environment is None else environment
    settings = _from_pip(_pip_values(env), env)
    return settings if settings.index_url or settings.extra_index_urls else _with_uv(settings, env)


def index_settings() -> IndexSettings:
    """Return the host's settings; where they name no index, with the one that uv asks.

    Raises:
        HostError: uv does not say which one that is.
        ProgramNotFound: there is no uv.
    """
    settings = host_settings()
    if settings.index_url or settings.no_index:
        return settings
    return replace(settings, index_url=default_index_url())


def default_index_url() -> str:
    """Return the index that uv asks when nothing is configured, so that its name is written down in one place only.

    Raises:
        HostError: uv does not say.
        ProgramNotFound: there is no uv.
    """
    options = ("--quiet", "--no-header", "--emit-index-url", "--no-config", "--no-cache")  # home may be read-only
    command = [str(find_uv()), "pip", "compile", *options, "--python", sys.executable, "-"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    try:
        done = subprocess.run(
            command, input="", capture_output=True, text=True, env=clean, timeout=_UV_TIMEOUT, cwd="/", check=False
        )
        said = done.stderr
        if match := re.search(r"^--index-url (\S+)$", done.stdout, re.MULTILINE):
            return match[1]
    except (OSError, subprocess.SubprocessError) as error:
        said = str(error)
    raise HostError("uv does not say which package index it uses", reason=said.strip(), hint="set PIP_INDEX_URL")


def without_credentials(url: str) -> str:
    """Return a URL as servers are asked for it; for messages see :func:`shown`."""
    return _USER.sub(r"\1", url)


def shown(address: str) -> str:
    """Return an address fit for messages and records: without credentials, and without the query that may sign it."""
    plain = _USER_OR_LOGIN.sub(r"\1", address)
    return re.split("[?#]", plain, maxsplit=1)[0] if "://" in plain else plain  # paths may have "?" and "#"


def parse_moment(text: str) -> datetime:
    """Read a moment: ``2024-03-01`` (its beginning, UTC) or ISO 8601 with a time.

    Raises:
        InvalidValue: it is neither.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidValue(f"{text!r} is not a date", hint="write it like 2024-03-01 or 2024-03-01T12:00:00Z") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _pip_values(env: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for path in _pip_files(env):
        parser = configparser.RawConfigParser()
        with suppress(OSError, configparser.Error, UnicodeDecodeError):  # pip itself complains; another file may do
            parser.read(path, encoding="utf-8")
        for section in filter(parser.has_section, _SECTIONS):
            values.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    given = {name[4:].lower().replace("_", "-"): value for name, value in env.items() if name.startswith("PIP_")}
    return values | given


def _pip_files(env: Mapping[str, str]) -> Iterator[Path]:
    """Pip's configuration files, the weakest first (pip's documentation, "Configuration")."""
    chosen = env.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    for directory in reversed(env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip/pip.conf"
    yield Path("/etc/pip.conf")
    if (home := home_directory(env)) is not None:
        yield home / ".pip/pip.conf"
    if (own := _own_settings(env)) is not None:
        yield own / "pip/pip.conf"
    yield Path(env.get("VIRTUAL_ENV") or sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def _from_pip(values: Mapping[str, str], env: Mapping[str, str]) -> IndexSettings:
    cert = values.get("cert") or env.get("SSL_CERT_FILE") or env.get("REQUESTS_CA_BUNDLE")
    names = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    proxies = {name: value for name in names if (value := env.get(name) or env.get(name.upper()))}
    if proxy := values.get("proxy"):
        proxies |= {"http_proxy": proxy, "https_proxy": proxy}
    timeout = values.get("default-timeout") or values.get("timeout") or ""
    return IndexSettings(
        index_url=values.get("index-url"),
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        no_index=values.get("no-index", "").lower() in _TRUE,
        cert=Path(cert) if cert and Path(cert).is_file() else None,
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        proxies=tuple(sorted(proxies.items())),
        timeout=max(float(timeout), 1.0) if _NUMBER.fullmatch(timeout) else IndexSettings().timeout,
    )


def _with_uv(settings: IndexSettings, env: Mapping[str, str]) -> IndexSettings:
    """Add uv's indexes; its environment comes before its files."""
    own = _own_settings(env)
    files = [Path("/etc/uv/uv.toml")] if own is None else [own / "uv/uv.toml", Path("/etc/uv/uv.toml")]
    tables = [_read_toml(path) for path in ([Path(env["UV_CONFIG_FILE"])] if env.get("UV_CONFIG_FILE") else files)]

    rows = [row for row in _values(tables, "index") if isinstance(row, dict) and "url" in row]
    defaults = [row["url"] for row in rows if row.get("default")]
    main = [env.get("UV_DEFAULT_INDEX"), env.get("UV_INDEX_URL"), *defaults, *_values(tables, "index-url")]
    extra = f"{env.get('UV_INDEX', '')} {env.get('UV_EXTRA_INDEX_URL', '')}".split() + _values(
        tables, "extra-index-url"
    )
    extra += [row["url"] for row in rows if not row.get("default")]
    links = [*env.get("UV_FIND_LINKS", "").split(","), *_values(tables, "find-links")]
    return replace(
        settings,
        index_url=next((_NAME.sub("", str(url)) for url in main if url), None),
        extra_index_urls=tuple(dict.fromkeys(_NAME.sub("", str(url)) for url in extra)),
        find_links=(*settings.find_links, *(str(link) for link in links if link)),
    )


def _values(tables: list[dict[str, Any]], name: str) -> list[Any]:
    """What several files say of one setting, which may be one value or a list."""
    values = [table.get(name) or [] for table in tables]
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def _own_settings(env: Mapping[str, str]) -> Path | None:
    """The directory of this user's settings (the XDG base directory specification), if there is one."""
    if chosen := env.get("XDG_CONFIG_HOME"):
        return Path(chosen)
    home = home_directory(env)
    return None if home is None else home / ".config"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # uv itself complains; another file may do
        return {}


def find_uv() -> Path:
    """Return the program's path, links resolved.

    Raises:
        ProgramNotFound: the package ``uv`` is there and its program is not.
    """
    import uv  # noqa: PLC0415 - most commands need none

    try:
        with _FINDING:
            return Path(uv.find_uv_bin()).resolve(strict=True)
    except OSError as error:
        raise ProgramNotFound(
            "there is no uv program",
            reason=f"the Python package uv was installed without it: {error}",
            hint="pip install --force-reinstall uv",
        ) from error


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
