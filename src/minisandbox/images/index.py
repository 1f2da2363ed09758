"""The package index settings of this host: what pip and uv are configured with, read and never changed."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from minisandbox.errors import HostError
from minisandbox.images.uvtool import find_uv
from minisandbox.store.paths import home_directory

_SECTIONS = ("global", "download", "install")
_TRUE = frozenset({"1", "true", "yes", "on"})
_UV_TIMEOUT = 30.0
_NAME = re.compile(r"^[\w.-]+=")
"""What UV_INDEX and UV_DEFAULT_INDEX may have before an address."""
_BEGINNING = re.compile(r"(?:[\w.-]+=)?(?:[A-Za-z][\w+.-]*(?::|(?=//))/*)?")
_PLAIN_SERVER = re.compile(r"(?:\[[^\[\]@]*\]|[^\[\]:@]*)(?::[0-9]*)?")


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
    def urls(self) -> tuple[str, ...]:
        """Every configured index and page, in the order in which they are asked; without the tools' default."""
        indexes = () if self.no_index else tuple(filter(None, (self.index_url, *self.extra_index_urls)))
        return (*indexes, *self.find_links)


def host_settings(environment: Mapping[str, str] | None = None) -> IndexSettings:
    """Read the settings of pip (files, then environment) and of uv where pip has none.

    Args:
        environment: the process's own by default.
    """
    env = os.environ if environment is None else environment
    values: dict[str, str] = {}
    for path in _pip_files(env):
        values.update(_read_pip_file(path))
    values.update({name[4:].lower().replace("_", "-"): value for name, value in env.items() if name.startswith("PIP_")})
    settings = _from_pip(values, env)
    if settings.index_url is None and not settings.extra_index_urls:
        settings = _with_uv(settings, env)
    return settings


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
        text = subprocess.run(
            command, input="", capture_output=True, text=True, env=clean, check=True, timeout=_UV_TIMEOUT, cwd="/"
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise HostError("uv cannot be asked for its package index", reason=said, hint="set PIP_INDEX_URL") from error
    if match := re.search(r"^--index-url (\S+)$", text, re.MULTILINE):
        return match[1]
    raise HostError("uv names no package index", hint="set PIP_INDEX_URL")


def has_credentials(url: str) -> bool:
    """Whether a URL carries a user name or password."""
    return "@" in urlsplit(url).netloc


def without_credentials(url: str) -> str:
    """Return a URL as servers are asked for it; for messages see :func:`shown`."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def shown(address: str) -> str:
    """Return an address fit for messages and records: without credentials, and without the query that may sign it.

    Nor what seems to be that of one that is mistyped: a password with a "/" in it, or "https:/" before a user.
    """
    beginning = _BEGINNING.match(address)
    assert beginning is not None
    start, rest = beginning[0], address[beginning.end() :]
    if not start.endswith("/") and "@" in rest:  # a user, and a password or the path at a server: user:pw@h, user@h:x
        start, rest = "", address
    server = re.split("[/?#]", rest, maxsplit=1)[0]
    if not start.endswith("///") and not _PLAIN_SERVER.fullmatch(server):
        end = len(server) if "@" in server else len(rest)
        rest = rest[:end].rpartition("@")[2] + rest[end:]
    return start + (re.split("[?#]", rest, maxsplit=1)[0] if "://" in start else rest)  # paths may have "?" and "#"


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


def _read_pip_file(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):  # pip itself complains; another file may do
        return {}
    found: dict[str, str] = {}
    for section in _SECTIONS:
        if parser.has_section(section):
            found.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    return found


def _from_pip(values: Mapping[str, str], env: Mapping[str, str]) -> IndexSettings:
    cert = values.get("cert") or env.get("SSL_CERT_FILE") or env.get("REQUESTS_CA_BUNDLE")
    proxies = dict(_proxies(env))
    if proxy := values.get("proxy"):
        proxies.update({"http_proxy": proxy, "https_proxy": proxy})
    return IndexSettings(
        index_url=values.get("index-url"),
        extra_index_urls=tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        no_index=values.get("no-index", "").lower() in _TRUE,
        cert=Path(cert) if cert and Path(cert).is_file() else None,
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        proxies=tuple(sorted(proxies.items())),
        timeout=_seconds(values.get("default-timeout") or values.get("timeout") or ""),
    )


def _seconds(text: str) -> float:
    try:
        return max(float(text), 1.0)
    except ValueError:
        return IndexSettings().timeout


def _proxies(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        if value := env.get(name) or env.get(name.upper()):
            yield name, value


def _with_uv(settings: IndexSettings, env: Mapping[str, str]) -> IndexSettings:
    """Add uv's indexes; its environment comes before its files."""
    main = env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL")
    extra = (env.get("UV_INDEX", "") + " " + env.get("UV_EXTRA_INDEX_URL", "")).split()
    links = env.get("UV_FIND_LINKS", "").split(",")
    for path in _uv_files(env):
        table = _read_toml(path)
        main = main or _main_of(table)
        extra += _texts(table.get("extra-index-url")) + [url for url, default in _indexes(table) if not default]
        links += _texts(table.get("find-links"))
    return replace(
        settings,
        index_url=main and _NAME.sub("", main),
        extra_index_urls=tuple(dict.fromkeys(_NAME.sub("", url) for url in extra)),
        find_links=(*settings.find_links, *filter(None, links)),
    )


def _uv_files(env: Mapping[str, str]) -> Iterable[Path]:
    if chosen := env.get("UV_CONFIG_FILE"):
        return [Path(chosen)]
    own = _own_settings(env)
    return [*([own / "uv/uv.toml"] if own is not None else []), Path("/etc/uv/uv.toml")]


def _own_settings(env: Mapping[str, str]) -> Path | None:
    """The directory of this user's settings (the XDG base directory specification), if there is one."""
    if chosen := env.get("XDG_CONFIG_HOME"):
        return Path(chosen)
    home = home_directory(env)
    return None if home is None else home / ".config"


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # uv itself complains; another file may do
        return {}


def _main_of(table: Mapping[str, object]) -> str | None:
    defaults = [url for url, default in _indexes(table) if default]
    return defaults[0] if defaults else next(iter(_texts(table.get("index-url"))), None)


def _indexes(table: Mapping[str, object]) -> list[tuple[str, bool]]:
    rows = table.get("index")
    if not isinstance(rows, list):
        return []
    return [(str(row["url"]), bool(row.get("default"))) for row in rows if isinstance(row, dict) and "url" in row]


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [str(value)] if value else []
