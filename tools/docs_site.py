"""Extend mkdocs for the documentation site: add root documents and command help, and check every link.

``mkdocs.yml`` names this file as a hook of mkdocs, and :class:`Docstrings` as an extension of griffe.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from minisandbox.cli.main import COMMANDS, parser

ROOT = Path(__file__).resolve().parent.parent
PROJECT = {
    f"{name.lower()}.md": f"{name}.md" for name in ("README", "ARCHITECTURE", "SECURITY", "CONTRIBUTING", "CHANGELOG")
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\](?:\([^)]*\))?)*)\]\((?P<target>[^)\s]+)\)")
AS_TWIN = re.compile(r"As :\w+:`[^`]+`\.")
COMMANDS_MARK = "<!-- commands -->"
log = get_plugin_logger("site")


# --- navigation and pages --------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns of the navigation, and drop pages that this checkout lacks."""
    docs = Path(config.docs_dir)
    present = sorted(str(path.relative_to(docs)) for path in docs.rglob("*.md")) + sorted(PROJECT)
    named = set(_named(config.nav))
    config.nav = _expanded(config.nav, [page for page in present if page not in named], set(present))
    return config


def _named(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            if isinstance(value, list):
                yield from _named(value)
            elif "*" not in value:
                yield value


def _expanded(nav: list[Any], unnamed: list[str], present: set[str]) -> list[Any]:
    """Replace patterns in a navigation by the matching pages; leave out sections without pages."""
    result: list[Any] = []
    for entry in nav:
        [(title, value)] = entry.items() if isinstance(entry, dict) else [("", entry)]
        if isinstance(value, list):
            pages = _expanded(value, unnamed, present)
            result += [{title: pages}] if pages else []
        elif "*" in value:
            result += [page for page in unnamed if fnmatch(page, value) and page.count("/") == value.count("/")]
        elif value in present:
            result.append(entry)
    return result


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents in the repository's root directory."""
    for page, name in PROJECT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the commands' help, and rewrite links to repository files as links to the site's pages."""
    uri = page.file.src_uri
    if COMMANDS_MARK in markdown:
        markdown = markdown.replace(COMMANDS_MARK, "\n".join(_help()))
    home = PurePosixPath(PROJECT.get(uri, f"docs/{uri}")).parent

    def lead(match: re.Match[str]) -> str:
        path, hash_mark, anchor = match["target"].partition("#")
        if "://" in path:
            if not re.fullmatch(r"https?://[\w.-]+(:\d+)?(/[^\s<>]*)?", path):
                log.warning("%s: malformed address %s", uri, path)
            return match[0]
        if not path or path.startswith("mailto:"):
            return match[0]
        source = os.path.normpath(home / path)
        target = source.removeprefix("docs/") if source.startswith("docs/") else source.lower()
        if files.get_file_from_path(target) is not None:
            relative = os.path.relpath(target, PurePosixPath(uri).parent)
            return f"{match['image']}[{match['text']}]({relative}{hash_mark}{anchor})"
        if not (ROOT / source).exists():
            log.warning("%s: a link leads to %s, which does not exist", uri, source)
        if config.repo_url:
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/blob/HEAD/{source}{hash_mark}{anchor})"
        return match["text"]  # drop the link: the site lacks the file, and no repository is configured

    return "".join(
        part if part.startswith(("```", "~~~")) else LINK.sub(lead, part)
        for part in re.split(r"(^(?:```|~~~).*?^(?:```|~~~)[^\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    )


# --- the commands' help ----------------------------------------------------------------------------------------------


def _help() -> Iterator[str]:
    """Yield a section for each command, with the help that its parser prints."""
    os.environ["COLUMNS"] = "80"
    yield _block("minisandbox", parser([]), 2)
    for noun in COMMANDS:
        verbs = _below(_below(parser([noun]))[noun])  # a noun may declare only the options of verbs on the command line
        yield from _tree(f"minisandbox {noun}", _below(parser([noun, *verbs]))[noun], 2)


def _tree(name: str, command: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield _block(name, command, level)
    for verb, below in _below(command).items():
        yield from _tree(f"{name} {verb}", below, 3)


def _below(command: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _block(name: str, command: argparse.ArgumentParser, level: int) -> str:
    return f"{'#' * level} {name}\n\n```text\n{command.format_help().rstrip()}\n```\n"


# --- docstrings ------------------------------------------------------------------------------------------------------


class Docstrings(griffe.Extension):
    """Prepares docstrings for the site: turns reStructuredText roles into links, and hides private constructors."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite the docstrings of a package."""
        public = {name: f"{pkg.path}.{name}" for name, item in pkg.members.items() if isinstance(item, griffe.Alias)}
        errors = pkg["errors"]
        error_paths = {name: error.path for name, error in errors.members.items() if isinstance(error, griffe.Class)}
        homes = public | error_paths
        for part in list(_objects(pkg)):
            if isinstance(part, griffe.Class):
                _prepare(part, part.parent is errors)
            if part.docstring is not None and AS_TWIN.fullmatch(part.docstring.value):
                part.docstring = None  # pages leave out objects without a docstring
            elif part.docstring is not None:
                part.docstring.value = _linked(part, homes)


def _prepare(part: griffe.Class, error: bool) -> None:
    """Hide a constructor that only the package calls, and add an error's exit status to its docstring."""
    doc = part.docstring.value if part.docstring else ""
    if "dataclass" not in part.labels and ("Args:" not in doc or "core:" in doc):
        part.members.pop("__init__", None)
        if part.docstring is not None:
            part.docstring.value = re.sub(r"\n\nArgs:\n(    .*\n?)+", "", doc)
    if error and part.docstring is not None and "exit_code" in part.members:
        part.docstring.value += f"\n\nExit status {part.members['exit_code'].value}."


def _objects(top: griffe.Object) -> Iterator[griffe.Object]:
    yield top
    for member in top.members.values():
        if not isinstance(member, griffe.Alias):
            yield from _objects(member)


def _linked(part: griffe.Object, homes: Mapping[str, str]) -> str:
    """Convert a docstring to Markdown; link public names, and names of the docstring's own class."""
    scope = part if part.is_class or part.parent is None else part.parent

    def link(match: re.Match[str]) -> str:
        kind, name = match[1], match[2].lstrip(".~!").removeprefix("minisandbox.")
        top, dot, member = name.partition(".")
        if top in homes:
            return f"[`{name}`][{homes[top]}{dot}{member}]"
        if scope.is_class and top in scope.members and not dot:
            return f"[`{name}`][{scope.path}.{name}]"
        return f"`{name}()`" if kind in ("func", "meth") and not dot else f"`{name}`"

    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r":(\w+):`([^`]+)`", link, part.docstring.value))


# --- links of the built pages ----------------------------------------------------------------------------------------


class _Scan(HTMLParser):
    """Collects a page's links, anchors and addresses of loaded files."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the addresses and anchors of a tag."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values:
            (self.loaded if tag == "link" else self.links).append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])
        if tag == "source" and "srcset" in values:
            self.loaded += [candidate.split()[0] for candidate in values["srcset"].split(",")]


def on_post_build(*, config: MkDocsConfig) -> None:
    """Check every link, image and anchor of the built pages, including those in raw HTML."""
    site = Path(config.site_dir)
    scans = {path: _Scan(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, scan in scans.items():
        for address in [*scan.links, *scan.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in scan.loaded and parts.scheme != "data":
                    log.warning("%s loads %s from another host", path.relative_to(site), address)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                log.warning("%s: %s leads nowhere", path.relative_to(site), address)
            elif parts.fragment and target in scans and unquote(parts.fragment) not in scans[target].anchors:
                log.warning("%s: %s has no such anchor", path.relative_to(site), address)
