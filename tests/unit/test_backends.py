"""``--backend`` and ``compare``, without an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minisandbox.cli import compare
from minisandbox.cli.main import main, parser
from minisandbox.errors import InvalidValue, ProgramNotFound, Unsupported
from minisandbox.grade import Status, Validated
from minisandbox.grade.sets.validations import RunUse
from minisandbox.sandbox import Sandbox
from minisandbox.sandbox.engines.client import Client
from minisandbox.sandbox.engines.images import reference_of
from minisandbox.types import ImageSpec

VALID = Validated("a", Status.VALID, repo="owner/a", reference=(RunUse("resolved", "", 1.0),), seconds=2.0)


def test_times_and_texts_do_not_make_verdicts_different() -> None:
    slower = replace(VALID, seconds=9.0, detail="another", reference=(RunUse("resolved", "", 5.0),))
    assert compare.Compared(VALID, slower, 0.0, 1, 1).equal


@pytest.mark.parametrize(
    "other",
    [
        replace(VALID, status=Status.ERROR),
        replace(VALID, tests=("t",)),
        replace(VALID, reference=(RunUse("unresolved", "", 1.0),)),
    ],
)
def test_other_verdicts_are_different(other: Validated) -> None:
    assert not compare.Compared(VALID, other, 0.0, 1, 1).equal


@pytest.mark.parametrize(
    "words", ["validate quickstart", "evaluate quickstart -p gold", "rollout quickstart --agent empty"]
)
def test_an_engine_and_a_cluster_cannot_be_combined(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert main([*words.split(), "--backend", "podman", "--cluster", "auto"]) == InvalidValue.exit_code
    assert "--backend and --cluster cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["validate", "t"], ["evaluate", "t", "-p", "gold"], ["rollout", "t", "--agent", "empty"]]
)
def test_namespaces_are_the_default(words: list[str]) -> None:
    assert parser(words).parse_args(words).backend == "sandbox"


def test_an_engine_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramNotFound, match="podman is not installed"):
        Sandbox.create(ImageSpec("a", (tmp_path,), backend="podman"))


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="'lxc' is not known"):
        Sandbox.create(ImageSpec("a", (tmp_path,), backend="lxc"))


def test_an_upper_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported):
        Sandbox.create(ImageSpec("a", (tmp_path,), backend="podman"), upper=tmp_path)


def test_the_name_of_an_image_depends_on_its_layers() -> None:
    one, other = ImageSpec("Owner/A", (Path("/a"),)), ImageSpec("Owner/A", (Path("/b"),))
    assert reference_of(one).startswith("localhost/minisandbox/owner-a:")
    assert reference_of(one) != reference_of(other)


@pytest.mark.parametrize(
    ("host", "remote"),
    [("", False), ("unix:///run/docker.sock", False), ("tcp://node:2375", True), ("ssh://u@node", True)],
)
def test_an_engine_elsewhere_is_remote(monkeypatch: pytest.MonkeyPatch, host: str, remote: bool) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    assert Client("docker", "docker").remote is remote


def test_json_names_both_sides() -> None:
    row = compare._fields(compare.Compared(VALID, VALID, 0.5, 1, 2))
    assert json.loads(json.dumps(row))["engine"]["status"] == "valid"
