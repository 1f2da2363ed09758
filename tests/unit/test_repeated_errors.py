"""An error that affects many tasks: printed once, with the number of tasks and the first one's id."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import pytest

from minisandbox.cli.common.output import Repeats, raise_failures
from minisandbox.cli.main import main
from minisandbox.errors import BuildError, HostError, MiniSandboxError, SourceError


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty store, and a package index that is down."""
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path))
    for name, value in (("CONFIG_FILE", "/dev/null"), ("INDEX_URL", "http://127.0.0.1:9/simple")):
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


def failed(name: str, reason: str = "a cause") -> MiniSandboxError:
    hint = f"the whole output is in /store/logs/{name}.log"
    return BuildError(f"build step 'python' of image {name!r} failed", reason=reason, hint=hint)


def test_a_set_without_an_index(no_index: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "build", "quickstart", "--only", "pallets*"]) == SourceError.exit_code
    said = capsys.readouterr().err
    assert said.count("cannot read http://127.0.0.1:9/simple/click/") == 1
    assert "3 tasks: cannot read http://127.0.0.1:9/simple/click/ (first: pallets__click-8.1.7." in said


def test_a_shared_error_names_each_task_alone(no_index: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "quickstart", "--only", "pallets*"]) == 30
    captured = capsys.readouterr()
    assert captured.out.count("cannot read") == captured.err.count("cannot read") == 1
    assert captured.out.count("the same error as pallets__click-8.1.7.") == 2
    (line,) = (line for line in captured.err.splitlines() if "cannot read" in line)
    assert line.count("pallets__click-") == 2  # whose result it is, and what could not be read for


def test_errors_are_grouped_without_names(capsys: pytest.CaptureFixture[str]) -> None:
    raise_failures({})
    failures = {"a__b-1": failed("a__b-1"), "a__b-2": failed("a__b-2"), "a__b-3": failed("a__b-3", "another cause")}
    with pytest.raises(BuildError, match=r"^2 tasks: build step 'python' of image 'a__b-1' failed \(first: a__b-1\)"):
        raise_failures(failures)
    assert capsys.readouterr().err.startswith("minisandbox: build step 'python' of image 'a__b-3' failed; likely")


def test_a_repeated_error_is_a_reference() -> None:
    once = Repeats().once
    texts = [once(name, str(failed(name))) for name in ("a__b-1", "a__b-2", "a__b-1")]
    assert texts == [str(failed("a__b-1")), "the same error as a__b-1", "the same error as before"]
    assert once("a__b-2", "other") == "other"


def test_a_copy_of_an_error_is_its_own() -> None:
    error = BuildError("no", step="s", log=Path("/l"), hint="h")
    own = copy(error).about("me")
    assert (error.what, own.what, own.step, own.hint) == ("no", "me: no", "s", "h")
    assert copy(HostError("x", reason="y")).reason == "y"
