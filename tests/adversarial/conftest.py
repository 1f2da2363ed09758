"""The suite's own modules are imported by their full names; their assertions are explained as those of tests."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.adversarial")
