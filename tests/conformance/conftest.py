"""The contract's cases are imported by their full names, and their assertions are explained as those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance")
