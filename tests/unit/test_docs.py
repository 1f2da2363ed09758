"""The documents: links lead somewhere, commands exist, dependencies have reasons."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisandbox.cli.main import COMMANDS, parser
from minisandbox.integrations.skyrl.config import SandboxOptions
from minisandbox.train.config import RlConfig, SftConfig
from minisandbox.train.options import describe

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_links_lead_somewhere(document: Path) -> None:
    targets = [match[1] for match in LINK.finditer(document.read_text(encoding="utf-8"))]
    broken = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not broken


def links(document: Path) -> set[Path]:
    targets = (match[1] for match in LINK.finditer(document.read_text(encoding="utf-8")))
    return {(document.parent / target).resolve() for target in targets if "://" not in target}


def test_the_index_leads_everywhere() -> None:
    """By way of other documents, too."""
    reached, ahead = set[Path](), {ROOT / "docs" / "index.md"}
    while ahead:
        reached |= ahead
        ahead = {path for one in ahead for path in links(one) if path.suffix == ".md"} - reached
    assert not [identify(path) for path in DOCUMENTS if path not in reached]


def commands(document: Path) -> Iterator[str]:
    """The lines of console blocks that call minisandbox."""
    for block in re.findall(r"```console\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ minisandbox "):
                yield line.removeprefix("$ minisandbox ")


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_commands_parse(document: Path) -> None:
    for line in commands(document):
        words = shlex.split(line.partition(" -- ")[0], comments=True)
        assert words[0] in COMMANDS, line
        parser(words).parse_args(words)  # exits where an option does not exist


def options_in(words: list[str]) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The options of a command that need not be whole, each with the parser that should know it.

    Raises:
        KeyError: there is no such noun or verb.
    """
    at = parser(words)
    for word in words:
        below = next((one for one in at._actions if isinstance(one, argparse._SubParsersAction)), None)
        if word.startswith("-"):
            yield word.partition("=")[0], at
        elif below is not None:
            at = below.choices[word]


def test_the_page_from_the_original_names_only_what_there_is() -> None:
    text = (ROOT / "docs" / "from-the-original.md").read_text(encoding="utf-8")
    spans = re.findall(r"`(minisandbox[ .][^`]+)`", text)
    ours = {one.key for one in describe(SandboxOptions, "minisandbox.")} | {"minisandbox.config"}
    assert len(spans) > 60
    for span in spans:
        if span.startswith("minisandbox."):
            assert span.partition("=")[0] in ours, span
            continue
        words = shlex.split(span)[1:]
        assert words[0] in COMMANDS, span
        for word, at in options_in(words):
            assert word in at._option_string_actions, f"{span}: {word}"
        kind = {"sft": SftConfig, "rl": RlConfig}.get(words[1]) if words[0] == "train" else None
        for key in re.findall(r"--set (\S+?)=", span):
            assert kind is not None
            assert key in {one.key for one in describe(kind)}, span


@pytest.mark.parametrize("document", DOCUMENTS, ids=identify)
def test_targets_of_make_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = re.findall(r"^\$ make ([a-z-]+)|`make ([a-z-]+)`", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {a or b for a, b in named} <= targets


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in declared}
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| `([\w-]+)` \| \S", text, flags=re.MULTILINE))
    assert names == explained


def test_locks_name_no_place() -> None:
    for lock in ("requirements.lock", "requirements-dev.lock", "requirements-docs.lock"):
        text = (ROOT / lock).read_text(encoding="utf-8")
        assert "==" in text
        assert "--hash=sha256:" in text
        assert not re.search(r"https?:|file:|--index|--find-links|@ ", text)
