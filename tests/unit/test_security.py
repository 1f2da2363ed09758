"""SECURITY.md and docs/security: their sizes and form, and that the tests and probes that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.adversarial.open import HOLES, SHARED
from tests.adversarial.probes import everything

ROOT = Path(__file__).resolve().parents[2]
SECURITY = ROOT / "SECURITY.md"
PAGES = sorted((ROOT / "docs" / "security").glob("*.md"))
GUARANTEE = re.compile(r"^\| (\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w-]+)`")
MOST_WORDS = 25
PARTS = ("Impact", "Bound", "Mitigation")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def guarantees() -> list[tuple[str, str, str]]:
    return GUARANTEE.findall(read(SECURITY))


@cache
def all_tests() -> frozenset[str]:
    """The names of all test functions."""
    found = re.compile(r"^\s*(?:async )?def (test_\w+)\(", re.MULTILINE)
    return frozenset(name for path in (ROOT / "tests").rglob("test_*.py") for name in found.findall(read(path)))


@cache
def probes() -> frozenset[str]:
    return frozenset(probe.name for probe in everything.probes())


def named(text: str) -> Iterator[str]:
    """Names in a text that have the form of a test's or of a probe's."""
    kinds = tuple({name.partition("-")[0] + "-" for name in probes()})
    return (name for name in NAME.findall(text) if name.startswith(("test_", *kinds)))


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Each heading of the third level, with the text below it."""
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, below = part.partition("\n")
        yield title, re.split(r"^## ", below, maxsplit=1, flags=re.MULTILINE)[0]


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", read(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_guarantees_are_numbered_and_short() -> None:
    assert [int(number) for number, _, _ in guarantees()] == list(range(1, len(guarantees()) + 1))
    assert len(guarantees()) >= 20
    assert [text for _, text, _ in guarantees() if len(text.split()) > MOST_WORDS] == []


def test_each_guarantee_names_what_holds_it() -> None:
    for number, _, held in guarantees():
        names = NAME.findall(held)
        assert names, number
        assert set(names) <= all_tests() | probes(), number


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_and_probes_exist(page: Path) -> None:
    assert set(named(read(page))) <= all_tests() | probes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_gap_has_impact_bound_and_mitigation(page: Path) -> None:
    found = list(sections(read(page)))
    assert found
    for title, text in found:
        assert re.findall(r"^- \*\*(\w+)\.\*\*", text, re.MULTILINE) == list(PARTS), title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_in_brackets_are_guarantees(page: Path) -> None:
    numbers = {number for group in re.findall(r"\[(\d+(?:, \d+)*)\]", read(page)) for number in group.split(", ")}
    assert numbers <= {number for number, _, _ in guarantees()}


@pytest.mark.parametrize("page", [SECURITY, *PAGES], ids=lambda page: page.name)
def test_cells_are_short(page: Path) -> None:
    rows = [line for line in read(page).splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row.split("|") if len(cell.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("page", [SECURITY, *PAGES], ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", read(page)):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def test_sizes() -> None:
    assert SECURITY.stat().st_size <= 8 << 10
    assert {page.name: page.stat().st_size for page in PAGES if page.stat().st_size > 10 << 10} == {}


def test_what_is_known_to_be_open_is_documented() -> None:
    text = "".join(map(read, PAGES))
    assert [name for name in HOLES if f"`{name}`" not in text] == []
    assert [name for name in SHARED if name not in text] == []
