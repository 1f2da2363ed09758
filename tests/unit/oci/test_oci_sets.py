"""Sets of images travel with their index and files, share what they have in common, and resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.oci_registry import Registry, answer
from tests.unit.oci_tools import END, MadeImage, digest, entry
from tests.unit.store_tools import two_images

from minisandbox.cli.main import main
from minisandbox.errors import ImageRefused, InvalidValue, NotFound, RegistryError
from minisandbox.images import fetch_files, pull, pull_set, push_set, read_set
from minisandbox.images.oci import manifest as m
from minisandbox.store import Store
from minisandbox.store.verify import verify

NAMES = ["task-0", "task-1", "task-2"]
BASE = entry("base", b"b" * 100_000) + END


@pytest.fixture
def family(store: Store, tmp_path: Path) -> Store:
    """Three images over one layer."""
    for number, name in enumerate(NAMES):
        made = MadeImage([BASE, entry("own", b"%d" % number) + END])
        pull(f"oci:{made.write_layout(tmp_path / name)}", store=store, name=name)
    return store


def place(server: Registry, tag: str = "v1") -> str:
    return f"127.0.0.1:{server.port}/team/app:{tag}"


def test_a_set_comes_back_by_its_names(server: Registry, family: Store, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    done = push_set(NAMES, place(server), store=family, files=[tmp_path / "results.jsonl"])
    assert (done.layers, done.sent) == (4, 4), "the common layer once"
    index = read_set(place(server))
    assert (index.digest, list(index.images)) == (done.digest, NAMES)
    other = Store.open(tmp_path / "other")
    server.requests.clear()
    result = pull_set(index, store=other)
    assert [image.name for image in result.images.values()] == NAMES
    assert not result.failures
    assert len(server.paths("/blobs/")) == 3 + 4, "three configurations, and each layer once"
    assert verify(other, full=True).damaged == ()
    [path] = fetch_files(index, tmp_path / "files")
    assert path.read_text() == "{}\n"
    one = Store.open(tmp_path / "one")
    assert pull(place(server, "task-1"), store=one).layers == other.image("task-1").layers, "engines pull by tag"
    server.requests.clear()
    pull_set(index, store=other)
    assert not server.requests, "what is here is not asked for"


def test_a_newer_set_replaces_images(server: Registry, family: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other")
    push_set(NAMES[:2], place(server), store=family)
    pull_set(read_set(place(server)), store=other)
    made = MadeImage([BASE, entry("own", b"newer") + END])
    pull(f"oci:{made.write_layout(tmp_path / 'newer')}", store=family, name="task-0")
    assert push_set(NAMES[:2], place(server), store=family).sent == 1
    index = read_set(place(server))
    pull_set(index, store=other)
    assert other.image("task-0").notes["digest"] == index.images["task-0"]
    assert len(pull_set(read_set(place(server)), store=other, only=["*-1"]).images) == 1
    with pytest.raises(NotFound, match="has no image 'x'"):
        pull_set(read_set(place(server)), store=other, only=["x"])


def test_private_copies_keep_their_layers(server: Registry, store: Store, tmp_path: Path) -> None:
    two_images(store)
    done = push_set(["one", "two"], place(server), store=store, private=True)
    assert done.layers == 3
    other = Store.open(tmp_path / "other")
    index = read_set(place(server))
    refused = pull_set(index, store=other)
    assert [type(error) for error in refused.failures.values()] == [InvalidValue] * 2
    server.requests.clear()
    assert not pull_set(index, store=other, private=True).failures
    assert len(server.paths("/blobs/")) == 2 + 3
    assert other.images() == store.images()


def test_an_interrupted_push_resumes(server: Registry, family: Store) -> None:
    server.faults["/manifests/task-2"] = [answer(400)]
    with pytest.raises(RegistryError):
        push_set(NAMES, place(server), store=family)
    assert "v1" not in server.manifests
    assert push_set(NAMES, place(server), store=family).sent == 0


def test_what_cannot_be_a_set(server: Registry, family: Store, tmp_path: Path) -> None:
    for names, tag, files, reason in (
        ([*NAMES, "none"], "v1", [], "'none'"),
        (NAMES, "task-1", [], "two of .* have the tag task-1"),
        (NAMES, "v1", [tmp_path / "missing"], "cannot be read"),
    ):
        with pytest.raises((InvalidValue, NotFound), match=reason):
            push_set(names, place(server, tag), store=family, files=files)
    assert not server.requests
    server.add(MadeImage([BASE]), "plain")
    with pytest.raises(InvalidValue, match="is not a set of images"):
        read_set(place(server, "plain"))


@pytest.mark.parametrize("title", ["../escape", "a/b", "", ".."])
def test_a_file_stays_in_its_directory(server: Registry, family: Store, tmp_path: Path, title: str) -> None:
    (tmp_path / "file").write_text("content")
    push_set(NAMES[:1], place(server), store=family, files=[tmp_path / "file"])
    index = read_set(place(server))
    manifest = json.loads(server.manifests[index.files])
    manifest["layers"][0]["annotations"][m.TITLE] = title
    text = json.dumps(manifest).encode()
    server.manifests[digest(text)] = text
    forged = type(index)(index.reference, index.digest, index.images, digest(text))
    with pytest.raises(ImageRefused, match="a file is named"):
        fetch_files(forged, tmp_path / "files")
    assert not (tmp_path / "escape").exists()


def test_the_commands(
    server: Registry, family: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISANDBOX_STORE", str(family.root))
    (tmp_path / "report.md").write_text("report")
    assert main(["image", "push", "task-*", place(server), "--attach", str(tmp_path / "report.md")]) == 0
    assert "4 layers, 4 of them sent" in capsys.readouterr().out
    assert main(["image", "push", "task-0", "--compression", "zstd", place(server, "plain")]) == 0
    assert main(["image", "push", "task-0", "task-1", place(server, "two"), "--json"]) == 0
    assert [*read_set(place(server, "two")).images] == NAMES[:2]
    capsys.readouterr()
    monkeypatch.setenv("MINISANDBOX_STORE", str(tmp_path / "other"))
    assert main(["image", "pull", "--set", place(server), "--only", "task-[01]", "-o", str(tmp_path / "files")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["task-0", "task-1"]
    assert lines[-1] == str(tmp_path / "files/report.md")
