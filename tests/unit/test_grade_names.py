"""Other names that a test's outcome is found under."""

from __future__ import annotations

import pytest

from minisandbox.grade.names import first_words

pytestmark = pytest.mark.once


def test_names_are_cut_off_at_the_first_space_and_the_first_line() -> None:
    outcomes = {"a.py::test[x y]": "passed", "test_b (B)\nIt works.": "failed"}
    words = {"a.py::test[x": "passed", "test_b": "failed", "test_b (B)": "failed"}
    assert first_words(outcomes) == outcomes | words


@pytest.mark.parametrize("blank", ["\n", " \n", "\x0b", "\x1c", "\u2028"], ids=ascii)
def test_a_name_that_begins_with_the_end_of_a_line_has_no_other(blank: str) -> None:
    assert first_words({f"{blank}test": "passed", "": "passed", " ": "passed"}) == {
        f"{blank}test": "passed", "": "passed", " ": "passed",
    }  # fmt: skip
