"""Every attack of the suite, in a real sandbox and, as a control, in none: one run of all of them, a test for each."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.adversarial import harness
from tests.adversarial.open import HOLES
from tests.adversarial.probes.core import ABSENT, OPEN, WORKS, Probe

PROBES = harness.all_probes()
OLDEST = (3, 8)
FEWEST = 230
PATIENCE = 1000.0


@pytest.fixture(scope="session")
def report() -> harness.Report:
    """Both runs, from a process of their own: what it leaks, its launcher inherits."""
    command = [sys.executable, str(harness.HERE / "harness.py"), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return harness.report_from(done.stdout.splitlines()[-1])


def each(probes: list[Probe]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("item", probes, ids=lambda item: item.name)


@pytest.mark.kernel
@each(PROBES)
def test_inside(item: Probe, report: harness.Report) -> None:
    """Blocked, or working, with control groups and without them."""
    results = [run.get(item.name, harness.MISSING) for run in report.inside.values()]
    wrong = [result for result in results if not harness.fine(result.verdict)]
    reason = HOLES.get(item.name)
    if reason is not None:
        assert all(result.verdict == OPEN for result in wrong), wrong
        assert wrong, "this hole is closed: take its line out of open.py"
        pytest.xfail(reason)
    assert not wrong, wrong
    if all(result.verdict == ABSENT for result in results):
        pytest.skip(results[0].detail)


@pytest.mark.kernel
@each(PROBES)
def test_without_a_sandbox(item: Probe, report: harness.Report) -> None:
    """It succeeds there: one that cannot shows nothing by failing in a sandbox."""
    result = report.control.get(item.name, harness.MISSING)
    if item.without:
        pytest.skip(f"not tried: {item.without}")
    if result.verdict == ABSENT:
        pytest.skip(result.detail)
    if result.verdict not in (OPEN, WORKS) and (item.maybe or (item.root and os.geteuid() != 0)):
        pytest.skip(f"not possible on this machine, or not as this user: {result.detail}")
    assert result.verdict == (WORKS if item.kind == "function" else OPEN), result.detail


@pytest.mark.kernel
def test_the_host_is_as_it_was(report: harness.Report) -> None:
    assert report.damage == ()


def test_there_are_many_and_the_table_of_holes_names_them() -> None:
    assert len(PROBES) >= FEWEST
    assert set(HOLES) <= {item.name for item in PROBES}
    assert all(item.title for item in PROBES)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(Path(harness.HERE, "probes").glob("*.py")):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"), feature_version=OLDEST)


def test_probes_need_an_old_python_and_nothing_else() -> None:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert all(alias.name in sys.stdlib_module_names for alias in node.names), name
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] in sys.stdlib_module_names, name
