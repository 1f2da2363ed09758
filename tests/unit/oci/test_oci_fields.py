"""Fields of configurations, manifests and indexes: what decides nothing is ignored, as engines do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tests.unit.oci_tools import END, MadeImage, digest, entry, folder

from minisandbox.errors import NotFound
from minisandbox.images import export_images, pull
from minisandbox.images.oci.config import read_config
from minisandbox.images.oci.manifest import own_platform
from minisandbox.store import Store

FIRST = folder("d") + entry("d/f") + END
SECOND = entry("b", b"second") + END
SHA = digest(b"x")


FIELDS: list[tuple[object, dict[str, object], list[str]]] = [  # a config, its fields as they are read, words of notes
    (None, {}, []),
    ([1], {}, ["config"]),
    ({"Env": None, "Cmd": None, "User": None, "Labels": None, "Volumes": None, "StopSignal": None}, {}, []),
    ({"Env": ["A", "=b", "", 5, None, "N=\0", "B=c=d", "E="]}, {"Env": ["B=c=d", "E="]}, ["variable"] * 6),
    ({"Env": ["A=1", "B=2", "A=3"]}, {"Env": ["A=1", "B=2", "A=3"]}, []),
    ({"Env": "A=b"}, {"Env": ["A=b"]}, []),
    ({"env": ["A=b"], "workingDir": "/w", "CMD": ["x"]}, {"Env": ["A=b"], "WorkingDir": "/w", "Cmd": ["x"]}, []),
    ({"Env": {"A": "b"}}, {}, ["Env"]),
    ({"Entrypoint": "run me", "Cmd": "sh"}, {"Entrypoint": ["run me"], "Cmd": ["sh"]}, []),
    ({"Entrypoint": {}, "Cmd": ["sh", 1], "Shell": 5, "OnBuild": [None]}, {},
     ["Entrypoint", "Cmd", "Shell", "OnBuild"]),
    ({"Labels": {"a": "b", "c": 1}}, {"Labels": {"a": "b"}}, ["label 'c'"]),
    ({"Labels": ["a=b"]}, {}, ["Labels"]),
    ({"ExposedPorts": {"80/tcp": None}, "Volumes": {"/v": {}, "w": 5}},
     {"ExposedPorts": {"80/tcp": {}}, "Volumes": {"/v": {}, "w": {}}}, []),
    ({"ExposedPorts": ["80/tcp"], "Volumes": "/v", "Healthcheck": [], "StopSignal": 15}, {},
     ["ExposedPorts", "Volumes", "Healthcheck", "StopSignal"]),
    ({"User": 5, "WorkingDir": ["/"]}, {}, ["User", "WorkingDir"]),
    ({"User": "a\0", "WorkingDir": "/\0"}, {}, ["User", "WorkingDir"]),
    ({"Healthcheck": {"Test": ["NONE"]}, "StopSignal": "SIGINT", "X": {"y": [1]}},
     {"Healthcheck": {"Test": ["NONE"]}, "StopSignal": "SIGINT", "X": {"y": [1]}}, []),
]  # fmt: skip


@pytest.mark.parametrize(("config", "fields", "notes"), FIELDS)
def test_a_malformed_field_is_ignored_with_a_note(config: object, fields: dict[str, object], notes: list[str]) -> None:
    read = read_config(json.loads(json.dumps(config)))
    assert read.fields == fields
    assert len(read.notes) == len(notes)
    assert all(note.startswith((word, f"the {word}")) for note, word in zip(read.notes, notes, strict=True))


def test_an_image_with_malformed_fields_is_taken(store: Store, tmp_path: Path) -> None:
    config = {"Env": ["X", "A=1", "A=2"], "Labels": [], "WorkingDir": "w//x/..", "User": 5, "Cmd": "sh"}
    image = pull(f"oci:{MadeImage([FIRST], config).write_layout(tmp_path / 'layout')}", store=store)
    assert dict(image.environment)["A"] == "2"
    assert (str(image.workdir), image.user, image.config["Cmd"]) == ("/w", "", ["sh"])
    lost = image.notes["not as in the image"]
    assert all(f"{name} is ignored" in lost for name in ("the variable", "Labels", "User"))
    again = pull(f"oci:{export(store, image.name, tmp_path)}", store=Store.open(tmp_path / "other"))
    assert "not as in the image" not in again.notes, "an export holds only what engines read"


def export(store: Store, name: str, tmp_path: Path) -> Path:
    """Export an image as a layout; return the path."""
    export_images(store, [name], tmp_path / "exported")
    return tmp_path / "exported"


TOPS: dict[str, dict[str, object]] = {
    "history": {"history": "none"},
    "created, author": {"created": 5, "author": ["me"]},
    "no operating system": {"os": None},
    "no architecture": {"os": "Linux", "architecture": ""},
    "uname's architecture": {"architecture": {"amd64": "x86_64", "arm64": "aarch64"}.get(own_platform().architecture)},
    "a variant of no text": {"variant": 8},
    "os.features": {"os.features": "win32k", "os.version": 10},
}


@pytest.mark.parametrize("case", TOPS)
def test_other_fields_of_a_configuration_decide_nothing(store: Store, tmp_path: Path, case: str) -> None:
    image = MadeImage([FIRST], architecture=own_platform().architecture, top=TOPS[case])
    taken = pull(f"oci:{image.write_layout(tmp_path / 'layout')}", store=store)
    assert taken.notes["platform"].startswith(str(own_platform()))
    assert "not as in the image" not in taken.notes


def test_an_image_without_layers(store: Store, tmp_path: Path) -> None:
    image = pull(f"oci:{MadeImage([]).write_layout(tmp_path / 'layout')}", store=store)
    assert sorted(path.name for path in image.spec().layers[0].iterdir()) == ["dev", "etc", "proc", "run", "sys", "tmp"]


OWN = {"os": "linux", "architecture": own_platform().architecture}
INDEXES: dict[str, list[dict[str, object]]] = {
    "an unknown media type": [{"mediaType": "application/vnd.example.thing+json", "digest": "?", "size": 1}, {}],
    "an unknown media type for the same platform": [
        {"mediaType": "application/vnd.example.thing+json", "digest": SHA, "size": 1, "platform": OWN},
        {"platform": OWN}],
    "an unknown media type alone with a platform": [
        {"mediaType": "text/plain", "digest": SHA, "size": 1, "platform": OWN}, {}],
    "no media type": [{"mediaType": None}],
    "annotations and platforms of odd types": [{"annotations": [1], "platform": "linux"}],
    "an attestation": [{"digest": SHA, "platform": {"os": "unknown", "architecture": "unknown"}}, {}],
    "several without a platform": [{}, {"digest": SHA}],
}  # fmt: skip
IMAGES_APART = ("an attestation", "several without a platform")
"""In index.json itself such entries are images that have to be told apart."""


@pytest.mark.parametrize(
    ("case", "nested"),
    [*((case, True) for case in INDEXES), *((case, False) for case in sorted(INDEXES.keys() - IMAGES_APART))],
)
def test_entries_of_an_index_that_are_ignored(store: Store, tmp_path: Path, case: str, nested: bool) -> None:
    image = MadeImage([FIRST], architecture=own_platform().architecture)
    layout = image.write_layout(tmp_path / "layout")
    plain = {name: value for name, value in image.row().items() if name != "platform"}
    rows = [{**plain, **row} for row in INDEXES[case]]
    index = json.dumps({"schemaVersion": 2, "manifests": rows}).encode()
    if nested:
        (layout / "blobs/sha256" / digest(index)[7:]).write_bytes(index)
        row = {"digest": digest(index), "size": len(index), "mediaType": "application/vnd.oci.image.index.v1+json"}
        index = json.dumps({"schemaVersion": 2, "manifests": [row]}).encode()
    (layout / "index.json").write_bytes(index)
    assert pull(f"oci:{layout}", store=store).notes["digest"] == digest(image.manifest)


FOREIGN = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"


def test_a_nondistributable_layer_is_used_where_the_source_holds_it(store: Store, tmp_path: Path) -> None:
    image = MadeImage([FIRST, SECOND], kinds=[FOREIGN, "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"])
    layout = image.write_layout(tmp_path / "layout")
    assert (pull(f"oci:{layout}", store=store).spec().layers[1] / "b").read_bytes() == b"second"
    (layout / "blobs/sha256" / digest(gzip.compress(SECOND, 1, mtime=0))[7:]).unlink()
    with pytest.raises(NotFound, match="nondistributable"):
        pull(f"oci:{layout}", store=Store.open(tmp_path / "other"))
