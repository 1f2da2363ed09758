"""Replay the seeds and the inputs that `make fuzz-parsers` found: each reaches other code of a parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_raise_only_their_errors(name: str) -> None:
    inputs = [*TARGETS[name].seeds(), *(path.read_bytes() for path in sorted((CORPUS / name).iterdir()))]
    assert len(inputs) > 20
    for data in inputs:
        TARGETS[name].run(data)
