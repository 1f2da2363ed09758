"""The host's package index settings for the time of one build step: variables and mounts, nothing that stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from minisandbox.errors import BuildError
from minisandbox.images.index import IndexSettings, has_credentials, without_credentials
from minisandbox.images.runner import MOUNTS
from minisandbox.images.simple_api import page_links
from minisandbox.images.web import file_path
from minisandbox.types import Mount

_PAGES_LOOKED_AT = 20
_QUIET = {
    "PIP_CACHE_DIR": "/tmp/build/pip-cache",  # noqa: S108 - pip 18 fails on PIP_NO_CACHE_DIR=1
    "PIP_ROOT_USER_ACTION": "ignore",
    "UV_CACHE_DIR": "/tmp/build/uv-cache",  # noqa: S108 - in the sandbox, gone with it
    "UV_LINK_MODE": "copy",
    "UV_NO_CONFIG": "1",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_DOWNLOADS": "never",
    # Like pip, take the best version of all indexes; the configured ones are the user's own choice.
    "UV_INDEX_STRATEGY": "unsafe-best-match",
}


@dataclass(frozen=True, slots=True)
class Access:
    """What a networked step gets.

    Attributes:
        environment: variables for its commands.
        mounts: local indexes, link directories and the certificates.
    """

    environment: dict[str, str]
    mounts: tuple[Mount, ...]


@dataclass(slots=True)
class _Mounted:
    """Local places on their way into the sandbox."""

    mounts: list[Mount] = field(default_factory=list)

    def show(self, path: Path, name: str) -> str:
        """Mount a path; return where it will be."""
        target = MOUNTS / name
        self.mounts.append(Mount(path, target))
        return str(target)


def index_access(settings: IndexSettings, step: str) -> Access:
    """Translate the host's settings for pip and uv inside a build sandbox.

    Args:
        settings: the host's.
        step: the step's name, for errors.

    Raises:
        BuildError: an index URL or proxy holds credentials, which must not get into a sandbox.
    """
    for url in (*settings.urls, *(value for name, value in settings.proxies if name != "no_proxy")):
        if has_credentials(url):
            raise BuildError(
                f"build step {step!r}: the URL of {without_credentials(url)!r} holds credentials",
                step=step,
                reason="code of packages runs in build steps and could read them",
                hint="configure an index that needs none, such as a local mirror (file://) or a proxy that adds them",
            )
    shown = _Mounted()
    indexes = [_inside(url, number, shown) for number, url in enumerate(filter(None, _index_urls(settings)))]
    main = indexes.pop(0) if settings.index_url and not settings.no_index else None
    links = [_links_inside(link, number, shown) for number, link in enumerate(settings.find_links)]
    variables = {**_QUIET, **_index_variables(main, indexes, links, settings), **dict(settings.proxies)}
    if settings.cert is not None:
        bundle = shown.show(settings.cert.resolve(), "certificates.pem")
        variables |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), bundle)
    return Access(variables, tuple(shown.mounts))


def _index_urls(settings: IndexSettings) -> tuple[str | None, ...]:
    return () if settings.no_index else (settings.index_url, *settings.extra_index_urls)


def _index_variables(main: str | None, extra: list[str], links: list[str], settings: IndexSettings) -> dict[str, str]:
    seconds = f"{settings.timeout:.0f}"
    variables = {"PIP_DEFAULT_TIMEOUT": seconds, "UV_HTTP_TIMEOUT": seconds}
    if main is not None:
        variables |= {"PIP_INDEX_URL": main, "UV_DEFAULT_INDEX": main}
    if extra:
        variables |= {"PIP_EXTRA_INDEX_URL": " ".join(extra), "UV_INDEX": " ".join(extra)}
    if links:
        variables |= {"PIP_FIND_LINKS": " ".join(links), "UV_FIND_LINKS": ",".join(links)}
    if settings.no_index:
        variables |= {"PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
    if settings.trusted_hosts:
        hosts = " ".join(settings.trusted_hosts)
        variables |= {"PIP_TRUSTED_HOST": hosts, "UV_INSECURE_HOST": hosts}
    return variables


def _inside(url: str, number: int, shown: _Mounted) -> str:
    """An index's URL inside; a local one is mounted with the directories that its pages link to, and nothing else."""
    if urlsplit(url).scheme != "file":
        return url
    root = file_path(url)
    if not root.is_dir():
        return url  # it is not there on the host either; pip and uv say so
    base, beside = _linked_directories(root)
    name = f"index/{number}"
    for directory in beside:
        shown.show(directory, f"{name}/{directory.relative_to(base)}")
    inner = root.relative_to(base)
    return "file://" + shown.show(root, f"{name}/{inner}" if inner.parts else f"{name}/simple")


def _linked_directories(root: Path) -> tuple[Path, list[Path]]:
    """Where a local index keeps its files, if not below itself: their common parent, and its folders that are used."""
    linked = {file_path(url).parent for url in islice(_links_of(root), 1000)}
    outside = [path for path in linked if root not in (path, *path.parents)]
    if not outside:
        return root, []
    base = root
    while any(base not in path.parents for path in outside):
        base = base.parent
    there = [path for path in outside if path.is_dir()]
    if base == Path("/"):  # nothing in common: a first component would be far too much to show
        return base, sorted(there)
    return base, sorted({base / path.relative_to(base).parts[0] for path in there})


def _links_of(root: Path) -> Iterator[str]:
    for page in islice(sorted(root.glob("*/index.html")), _PAGES_LOOKED_AT):
        for url in page_links(page.read_bytes(), page.as_uri()):
            if urlsplit(url).scheme == "file":
                yield url


def _links_inside(link: str, number: int, shown: _Mounted) -> str:
    scheme = urlsplit(link).scheme
    if scheme in {"http", "https"}:
        return link
    path = file_path(link) if scheme == "file" else Path(link).expanduser().absolute()
    if not path.exists():
        return link
    name = f"links/{number}" if path.is_dir() else f"links/{number}/{path.name}"
    return shown.show(path, name)
