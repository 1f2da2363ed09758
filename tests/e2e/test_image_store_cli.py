"""What is in my cache, what does it cost, what may I delete, how do I take it along: the commands as typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store_tools import add_layer, key_of, two_images

from minisandbox.errors import ImageRefused, InvalidValue, NotFound
from minisandbox.store import FailureRecord, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store")
    two_images(store)
    return store


def run(store: Store, *words: str, status: int = 0, data: bytes = b"") -> str:
    command = [sys.executable, "-m", "minisandbox", "image", *words]
    environment = {**os.environ, "MINISANDBOX_STORE": str(store.root)}
    done = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=False, input=data)
    assert done.returncode == status, done.stderr.decode()
    return (done.stdout if status == 0 or done.stdout else done.stderr).decode(errors="replace")


def read(store: Store, *words: str, status: int = 0) -> Any:
    return json.loads(run(store, *words, "--json", status=status))


def test_ls_says_what_there_is(store: Store) -> None:
    store.put_failure(FailureRecord("three", "install", "3" * 64, (), (), "/testbed", 1.0, "exit status 1\nlong"))
    (store.root / "images/broken.json").write_text("{")
    store.pin("two")
    rows = {row["name"]: row for row in read(store, "ls")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "one": "ready", "two": "ready", "three": "failed", "broken": "broken",
    }  # fmt: skip
    assert rows["one"]["unique_bytes"] > 0
    assert rows["one"]["shared_bytes"] > 0
    assert (rows["one"]["uses"], rows["one"]["in_use"], rows["two"]["kept"]) == (0, False, True)
    text = run(store, "ls")
    assert "ready, kept" in text
    assert "three: step install: exit status 1" in text
    assert "just now" in text
    assert [row["name"] for row in read(store, "ls", "--status", "failed")] == ["three"]
    assert [row["name"] for row in read(store, "ls", "t*")] == ["three", "two"]


def test_sizes_add_up(store: Store) -> None:
    (store.root / "downloads" / ("0" * 64)).write_bytes(bytes(10_000))
    found = read(store, "ls", "--sizes")
    parts = {part["name"]: part for part in found["parts"]}
    assert found["bytes"] == sum(part["bytes"] for part in parts.values())
    assert parts["downloads"]["bytes"] >= 10_000
    assert parts["layers"]["count"] == 3
    assert "removed by" in run(store, "ls", "--sizes")


def test_tree_shows_what_is_shared(store: Store) -> None:
    lines = run(store, "ls", "--tree").splitlines()
    assert lines[0].startswith(key_of("base")[:12])
    assert lines[0].endswith("in 2 images")
    assert [line.strip() for line in lines if "*" in line] == ["* one", "* two"]
    assert len(lines) == 5
    found = read(store, "ls", "--tree", "o*")
    assert found["images"] == {"one": [key_of("base"), key_of("one")]}
    assert found["layers"][key_of("base")]["images"] == 2


@pytest.mark.slow
def test_verify_finds_damage_and_says_what_to_do(store: Store) -> None:
    assert "is undamaged" in run(store, "verify", "--full")
    (store.layer_tree(key_of("one")) / "extra").touch()
    assert "0 layers damaged" in run(store, "verify", "two")
    text = run(store, "verify", status=1)
    assert "extra: is not in the list" in text
    assert "broken images: one" in text
    assert "image build" in text
    assert read(store, "verify", status=1)["images"] == ["one"]
    assert "layer" in run(store, "ls")


@pytest.mark.slow
def test_gc_says_before_it_does(store: Store) -> None:
    alone = add_layer(store, "alone", {"alone": "alone"})
    assert "1 layers without an image stay" in run(store, "gc")
    text = run(store, "gc", "--grace", "0s", "--dry-run")
    assert "would be removed" in text
    assert store.has_layer(alone)
    run(store, "gc", "--grace", "0s")
    assert not store.has_layer(alone)
    assert read(store, "gc", "--grace", "0s", "--budget", "0", "--keep", "o*", "--dry-run")["images"] == ["two"]
    assert store.pins() == set(), "a dry run keeps nothing"
    run(store, "gc", "--keep", "two")
    text = run(store, "gc", "--grace", "0s", "--budget", "1K", "--keep", "one")
    assert "above --budget" in text
    assert store.image_names() == ["one", "two"]
    assert read(store, "gc", "--grace", "0s", "--unused-for", "0s", "--no-keep", "*")["images"] == ["one", "two"]


WRONG = (
    ("gc", "--grace", "soon"),
    ("gc", "--budget", "much"),
    ("rm",),
    ("rm", "one", "--failed"),
    ("ls", "one", "--sizes"),
    ("export", "one", "-", "--json"),
)


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_values_are_said(store: Store, words: tuple[str, ...]) -> None:
    assert "what to do" in run(store, *words, status=InvalidValue.exit_code)


def test_rm_removes_images_and_failures(store: Store) -> None:
    store.put_failure(FailureRecord("three", "install", "3" * 64, (), (), "/testbed", 1.0))
    assert read(store, "rm", "one", "--dry-run")["images"] == ["one"]
    assert "image one" in run(store, "rm", "one")
    assert store.image_names() == ["two"]
    assert "failed build of three" in run(store, "rm", "--failed")
    store.put_failure(FailureRecord("three", "install", "3" * 64, (), (), "/testbed", 1.0))
    assert read(store, "rm", "t*")["images"] == ["two"]
    assert store.failures() == []
    run(store, "rm", "nothing", status=NotFound.exit_code)


@pytest.mark.slow
def test_images_travel_by_command(store: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other")
    file = str(tmp_path / "images.tar")
    assert "--private" in run(store, "export", "*", file, status=InvalidValue.exit_code)
    run(store, "export", "--private", "*", file)
    assert "--private" in run(other, "import", file, status=InvalidValue.exit_code)
    assert "one   2 layers\ntwo   2 layers\n" in run(other, "import", "--private", file)
    assert [image["name"] for image in read(other, "import", "--private", file)] == ["one", "two"]
    Path(file).write_bytes(Path(file).read_bytes()[:1000])
    run(other, "rm", "*")
    run(other, "import", "--private", file, status=ImageRefused.exit_code)
    assert read(store, "export", "--private", "one", str(tmp_path / "one"))["images"] == ["one"]


def test_images_travel_through_a_pipe(store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minisandbox", "image", "export", "--private", "one", "-"]
    environment = {**os.environ, "MINISANDBOX_STORE": str(store.root)}
    data = subprocess.run(command, capture_output=True, timeout=120, env=environment, check=True).stdout
    other = Store.open(tmp_path / "other")
    run(other, "import", "--private", "-", data=data)
    assert other.image_names() == ["one"]
