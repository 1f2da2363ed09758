"""The contract's cases are imported by their full names, and their assertions are explained as those of tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
pytest.register_assert_rewrite("tests.conformance")
