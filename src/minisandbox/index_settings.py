"""Read the package index settings of this host from the configuration of pip and uv."""

from __future__ import annotations

import configparser
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minisandbox import certificates
from minisandbox.store.disk.paths import home_directory

_SECTIONS = ("global", "download", "install")
_TRUE = frozenset({"1", "true", "yes", "on"})
_NUMBER = re.compile(r"\d{1,9}(?:\.\d*)?")
_NAME = re.compile(r"^[\w.-]+=")
"""Optional name before a URL in UV_INDEX and UV_DEFAULT_INDEX."""


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Sources of packages, and how to connect to them.

    Attributes:
        index_url: URL of the main index, or None for the tools' default.
        extra_index_urls: URLs of further indexes, which may be ``file://`` URLs.
        find_links: directories, pages and archives with links to packages.
        no_index: whether all indexes are disabled and only ``find_links`` is used.
        cert: the certificate bundle in pip's configuration, or :func:`.certificates.bundle`.
        trusted_hosts: hosts whose certificates are not checked.
        proxies: (variable, value) pairs, for example ``("https_proxy", "...")``.
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
        """The configured indexes in the order of requests, without the tools' default."""
        return () if self.no_index else tuple(filter(None, (self.index_url, *self.extra_index_urls)))

    @property
    def urls(self) -> tuple[str, ...]:
        """All configured indexes and ``find_links``."""
        return (*self.indexes, *self.find_links)


def host_settings(environment: Mapping[str, str] | None = None) -> IndexSettings:
    """Read pip's settings from its files and environment, and uv's if pip has no index.

    Args:
        environment: environment variables; those of the process by default.
    """
    env = os.environ if environment is None else environment
    settings = _from_pip(_pip_values(env), env)
    return settings if settings.index_url or settings.extra_index_urls else _with_uv(settings, env)


def uv_variables(settings: IndexSettings) -> dict[str, str]:
    """Return the environment variables that pass settings to uv, which ignores pip's settings and system certificates.

    Args:
        settings: the settings of this host.
    """
    values = {
        "UV_DEFAULT_INDEX": settings.index_url,
        "UV_INDEX": " ".join(settings.extra_index_urls),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # like pip, choose the best match from all indexes
        "UV_FIND_LINKS": ",".join(settings.find_links),
        "UV_INSECURE_HOST": " ".join(settings.trusted_hosts),
        "UV_HTTP_TIMEOUT": f"{settings.timeout:.0f}",
        "SSL_CERT_FILE": str(settings.cert or ""),
        **dict(settings.proxies),
    }
    return {name: value for name, value in values.items() if value}


def npm_files(env: Mapping[str, str]) -> list[Path]:
    """Return the user's configuration file of npm, if it exists."""
    home = home_directory(env)
    name = env.get("NPM_CONFIG_USERCONFIG") or env.get("npm_config_userconfig") or (home and home / ".npmrc")
    return [Path(name)] if name and Path(name).is_file() else []


def npm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return npm's configuration in environment variables, without paths of this machine (npm's documentation, config).

    The user's file is expected as ``npmrc`` among the mounts of a build step.
    """
    variables = {name: value for name, value in env.items() if name.lower().startswith("npm_config_")}
    paths = ("cache", "prefix", "userconfig", "globalconfig", "init_module", "cafile", "tmp", "local_prefix", "nodedir")
    portable = {
        name: value for name, value in variables.items() if name.lower().removeprefix("npm_config_") not in paths
    }
    return portable | {"npm_config_userconfig": "/run/minisandbox/npmrc"}


def _pip_values(env: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for path in _pip_files(env):
        parser = configparser.RawConfigParser()
        # Skip unreadable files: pip reports them itself.
        with suppress(OSError, configparser.Error, UnicodeDecodeError):
            parser.read(path, encoding="utf-8")
        for section in filter(parser.has_section, _SECTIONS):
            values.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    return values | {
        name[4:].lower().replace("_", "-"): value for name, value in env.items() if name.startswith("PIP_")
    }


def _pip_files(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield pip's configuration files, lowest precedence first (pip's documentation, "Configuration")."""
    config_file = env.get("PIP_CONFIG_FILE")
    if config_file == os.devnull:
        return
    for directory in reversed(env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")):
        yield Path(directory) / "pip/pip.conf"
    yield Path("/etc/pip.conf")
    if (home := home_directory(env)) is not None:
        yield home / ".pip/pip.conf"
    if (config_home := _config_home(env)) is not None:
        yield config_home / "pip/pip.conf"
    yield Path(env.get("VIRTUAL_ENV") or sys.prefix) / "pip.conf"
    if config_file:
        yield Path(config_file)


def _from_pip(values: Mapping[str, str], env: Mapping[str, str]) -> IndexSettings:
    cert = Path(values.get("cert") or "/nonexistent")
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
        cert=cert if cert.is_file() else certificates.bundle(env),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        proxies=tuple(sorted(proxies.items())),
        timeout=max(float(timeout), 1.0) if _NUMBER.fullmatch(timeout) else IndexSettings().timeout,
    )


def _with_uv(settings: IndexSettings, env: Mapping[str, str]) -> IndexSettings:
    """Add uv's indexes; uv's environment variables take precedence over its files."""
    config_home = _config_home(env)
    files = [Path("/etc/uv/uv.toml")] if config_home is None else [config_home / "uv/uv.toml", Path("/etc/uv/uv.toml")]
    tables = [_read_toml(path) for path in ([Path(env["UV_CONFIG_FILE"])] if env.get("UV_CONFIG_FILE") else files)]

    rows = [row for row in _values(tables, "index") if isinstance(row, dict) and "url" in row]
    defaults = [row["url"] for row in rows if row.get("default")]
    main_urls = [env.get("UV_DEFAULT_INDEX"), env.get("UV_INDEX_URL"), *defaults, *_values(tables, "index-url")]
    extra_urls = f"{env.get('UV_INDEX', '')} {env.get('UV_EXTRA_INDEX_URL', '')}".split() + _values(
        tables, "extra-index-url"
    )
    extra_urls += [row["url"] for row in rows if not row.get("default")]
    links = [*env.get("UV_FIND_LINKS", "").split(","), *_values(tables, "find-links")]
    return replace(
        settings,
        index_url=next((_NAME.sub("", str(url)) for url in main_urls if url), None),
        extra_index_urls=tuple(dict.fromkeys(_NAME.sub("", str(url)) for url in extra_urls)),
        find_links=(*settings.find_links, *(str(link) for link in links if link)),
    )


def _values(tables: list[dict[str, Any]], name: str) -> list[Any]:
    """Return the values of a setting in all files, where it may be a single value or a list."""
    values = [table.get(name) or [] for table in tables]
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def _config_home(env: Mapping[str, str]) -> Path | None:
    """Return the user's configuration directory (the XDG base directory specification), or None without a home."""
    if directory := env.get("XDG_CONFIG_HOME"):
        return Path(directory)
    home = home_directory(env)
    return None if home is None else home / ".config"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # skip unreadable files: uv reports them itself
        return {}
