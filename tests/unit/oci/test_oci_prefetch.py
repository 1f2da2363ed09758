"""Pulling many images: their size is known first; a limit, a failure or an interruption costs nothing more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.unit.oci_registry import Handler, Registry, answer
from tests.unit.oci_tools import END, MadeImage, digest, entry

from minisandbox.errors import DiskFull, ImageRefused, NotFound, RegistryError
from minisandbox.images import build, build_all, http_client, pull, pull_all
from minisandbox.images.dockerfile.reading import base_images
from minisandbox.spec import DockerfileBase, OciBase, Recipe
from minisandbox.store import Store
from minisandbox.values import human_size

PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n"
SHARED = entry("shared", os.urandom(400_000)) + END
PARTS = [entry(f"part{number}", os.urandom(100_000)) + END for number in range(4)]


@pytest.fixture
def bases(server: Registry) -> list[OciBase]:
    """Four images over one layer."""
    return [OciBase(server.add(MadeImage([SHARED, part]), f"v{number}")) for number, part in enumerate(PARTS)]


def blobs_asked_for(server: Registry) -> int:
    """How many layers' blobs were asked for."""
    large = [name for name, blob in server.blobs.items() if len(blob) > 50_000]
    return sum(any(name in path for name in large) for path, _ in server.requests)


# --- sizes and space -------------------------------------------------------------------------------------------------


def test_the_size_is_reported_before_any_layer(server: Registry, store: Store, bases: list[OciBase]) -> None:
    notes: list[tuple[int, str]] = []
    remaining: list[str] = []
    done = pull_all(
        bases,
        store=store,
        note=lambda text: notes.append((blobs_asked_for(server), text)),
        on_remaining=remaining.append,
    )
    size = human_size(sum(len(blob) for blob in server.blobs.values() if len(blob) > 50_000))
    [(before, text)] = notes
    assert text.startswith(f"4 images to pull: {size} compressed in 5 layers, each once; "), "the common layer once"
    assert text.endswith(f" free in {store.root}")
    assert before == 0
    assert (remaining[0], remaining[-1]) == (f"0 of 4 images, 0 B of {size}", "")
    assert list(done.images) == bases
    assert not done.failures
    assert blobs_asked_for(server) == 5
    assert len(server.paths("/manifests/")) == 4, "the pulls use the manifests of the look-ups"
    assert not os.listdir(store.root / "downloads")


def huge(server: Registry) -> OciBase:
    """Add an image whose manifest promises 50 TB."""
    image = MadeImage([END] * 400)
    manifest = json.loads(image.manifest)
    manifest["layers"] = [{**layer, "size": 127 << 30} for layer in manifest["layers"]]
    reference = server.add(image, "huge")
    server.manifests["huge"] = json.dumps(manifest).encode()
    return OciBase(reference)


def test_what_does_not_fit_is_refused_before_it_begins(server: Registry, store: Store, bases: list[OciBase]) -> None:
    base = huge(server)
    with pytest.raises(DiskFull, match=r"cannot pull 5 images: .* needed: 49\..* TiB .*; available: .*image gc"):
        pull_all([*bases, base], store=store)
    with pytest.raises(DiskFull, match=r"cannot pull .*huge: the layers do not fit into the store"):
        pull(base.reference, store=store)
    with pytest.raises(DiskFull, match="cannot pull 2 images"):
        build_all({"a": partial(Recipe, bases[0]), "b": partial(Recipe, base)}, store=store)
    assert blobs_asked_for(server) == 0
    assert not store.image_names()
    assert not os.listdir(store.root / "downloads")


def test_what_is_here_is_asked_for_only_where_it_is_named(server: Registry, store: Store, bases: list[OciBase]) -> None:
    pull_all(bases[:2], store=store)
    server.requests.clear()
    assert list(pull_all(bases[:2], store=store).images) == bases[:2]
    assert not server.requests
    newer = MadeImage([SHARED, PARTS[3]])
    server.add(newer, "v0")
    assert pull_all(bases[:2], store=store, again=bases[:1]).images[bases[0]].notes["digest"] == digest(newer.manifest)
    assert len(server.paths("/manifests/")) == 1


def test_a_limit_is_reported(server: Registry, store: Store, bases: list[OciBase]) -> None:
    manifest = server.manifests["v0"]
    server.faults["/manifests/v0"] = [
        answer(200, manifest, RateLimit_Limit="100;w=21600", RateLimit_Remaining="3;w=21600")
    ]
    notes: list[str] = []
    pull_all(bases, store=store, jobs=1, note=notes.append)
    assert "gives 100 in 6 hours to this address or user, 3 more now" in notes[1]


# --- failures and limits ---------------------------------------------------------------------------------------------


def test_a_failure_costs_the_others_nothing(server: Registry, store: Store, bases: list[OciBase]) -> None:
    server.faults["/manifests/v1"] = [answer(404)]
    server.faults[digest(MadeImage([PARTS[2]]).pack(PARTS[2]))] = [  # type: ignore[operator]
        answer(200, b"x" * 100_000)
    ] * 20
    malformed = OciBase("UPPER/case")
    done = pull_all([malformed, *bases], store=store)
    assert list(done.images) == [bases[0], bases[3]]
    assert {base: type(error) for base, error in done.failures.items()}.keys() == {malformed, bases[1], bases[2]}
    assert isinstance(done.failures[bases[1]], NotFound)
    assert isinstance(done.failures[bases[2]], ImageRefused | RegistryError)
    assert len(store.images()) == 2
    server.faults.clear()
    assert len(pull_all(bases, store=store).images) == 4


@pytest.mark.parametrize("where", ["/manifests/", "/blobs/"])
def test_a_registry_that_limits_requests_is_waited_for(
    server: Registry, store: Store, bases: list[OciBase], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(http_client, "_LONGEST_PAUSE", 0.5)
    server.faults[where] = [answer(429, Retry_After="2", RateLimit_Limit="100;w=21600")] * 3
    notes: list[str] = []
    began = time.monotonic()
    done = pull_all(bases, store=store, note=notes.append)
    assert list(done.images) == bases
    assert not done.failures
    assert 2 <= time.monotonic() - began < 30
    assert "too many requests" in notes[0]
    assert "100 in 6 hours" in notes[0]
    assert "waiting until" in notes[0]
    assert "registries.conf" in notes[0]


def test_a_registry_is_not_waited_for_longer_than_a_day(server: Registry, store: Store, bases: list[OciBase]) -> None:
    server.faults["/manifests/v2"] = [answer(429, Retry_After="90000")]
    done = pull_all(bases, store=store)
    assert list(done.failures) == [bases[2]]
    assert len(done.images) == 3


# --- builds ----------------------------------------------------------------------------------------------------------


def test_a_build_pulls_all_bases_first(server: Registry, store: Store, bases: list[OciBase], tmp_path: Path) -> None:
    server.faults["/manifests/v3"] = [answer(404)] * 9
    (tmp_path / "Dockerfile").write_text(f"ARG V=v1\nFROM {bases[0].reference[:-1]}1 AS a\nFROM {bases[2].reference}\n")
    dockerfile = Recipe(DockerfileBase(tmp_path / "Dockerfile", tmp_path))
    assert list(base_images(dockerfile)) == [bases[2]], "the other stage is not needed"
    recipes: dict[str, Callable[[], Recipe]] = {
        "a": partial(Recipe, bases[0]), "b": partial(Recipe, bases[3]), "c": lambda: dockerfile
    }  # fmt: skip
    notes: list[str] = []
    done = build_all(recipes, store=store, note=notes.append)
    assert list(done.images) == ["a", "c"]
    assert "is not in its registry" in str(done.failures["b"])
    assert notes[0].startswith("2 images to pull: ")
    assert "in 3 layers" in notes[0]
    assert len(server.paths("/manifests/v3")) == 1


def test_a_base_that_cannot_be_had_is_named(store: Store, tmp_path: Path) -> None:
    """It may be the name of an image that is yet to be built here."""
    reference = "127.0.0.1:1/root-trixie"
    (tmp_path / "Dockerfile").write_text(f"FROM {reference}\n")
    recipe = Recipe(DockerfileBase(tmp_path / "Dockerfile", tmp_path))
    with pytest.raises(RegistryError, match=f"^line 1: {reference}: registry .* cannot be reached"):
        build(recipe, store=store, name="a")
    failure = build_all({"a": lambda: recipe}, store=store).failures["a"]
    assert str(failure).startswith(f"line 1: {reference}: registry")


# --- the command -----------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """Start ``minisandbox image pull``."""
    environment = {**os.environ, "MINISANDBOX_STORE": str(tmp_path / "store")}
    return subprocess.Popen(
        [sys.executable, "-m", "minisandbox", "image", "pull", *words], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    """The status and the output of a process."""
    out, told = process.communicate(stdin, timeout=60)
    return process.returncode, out, told


def test_a_list_is_pulled(server: Registry, bases: list[OciBase], tmp_path: Path) -> None:
    text = "# four images\n" + "".join(f"{base.reference}  # one\n\n" for base in bases)
    status, out, told = ended(command(tmp_path, "--from", "-"), text)
    assert status == 0, told
    assert "4 images to pull: " in told
    assert "in 5 layers, each once" in told
    assert "free" in told
    assert out.splitlines()[-1].startswith("4 images, ")
    (tmp_path / "list").write_text(text)
    status, out, told = ended(command(tmp_path, "--from", str(tmp_path / "list"), "--json"))
    assert status == 0
    assert [row["notes"]["reference"] for row in json.loads(out)] == [base.reference for base in bases]
    assert "to pull" not in told


def test_images_of_tasks_are_pulled(server: Registry, bases: list[OciBase], tmp_path: Path) -> None:
    rows = [
        {"instance_id": f"t{number}", "repo": "o/r", "base_commit": "0" * 40, "problem_statement": "p", "patch": PATCH,
         "test_patch": "", "form": "swebench", "FAIL_TO_PASS": ["a"], "PASS_TO_PASS": [],
         "test": {"command": "python -m pytest", "timeout": 300}, "build": {"image": base.reference}}
        for number, base in enumerate(bases)
    ]  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status, out, told = ended(command(tmp_path, "--tasks", str(tmp_path / "tasks.jsonl"), "--only", "t[12]"))
    assert status == 0, told
    assert out.splitlines()[-1].startswith("2 images, ")


BAD = {
    "nothing": ((), 3, "no image to pull"),
    "a name for two": (("a", "b", "--name", "x"), 3, "--name and --private are for one image"),
    "a list that is not there": (("--from", "/nothing"), 3, "cannot be read"),
    "tasks without images": (("--tasks", "quickstart"), 3, "names a container image"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_pulled(tmp_path: Path, case: str) -> None:
    words, wanted, message = BAD[case]
    status, _, told = ended(command(tmp_path, *words))
    assert (status, message in told) == (wanted, True), told


def slowly(handler: Handler) -> bool:
    """Send a blob in pieces, for half a minute."""
    blob = handler.server.registry.blobs[handler.path.rpartition("/")[2]]
    handler.send(200, b"", length=len(blob))
    try:
        for at in range(0, len(blob), 1 << 10):
            handler.wfile.write(blob[at : at + (1 << 10)])
            handler.wfile.flush()
            time.sleep(0.2)
    except OSError:
        pass
    return True


def on_disk(path: Path) -> int:
    """A file's bytes; 0 where it is not there."""
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM))]
)
def test_an_interrupted_pull_resumes(server: Registry, bases: list[OciBase], tmp_path: Path, number: int) -> None:
    images = [digest(MadeImage([part]).pack(part)) for part in PARTS]  # type: ignore[operator]
    server.faults[images[3]] = [slowly]
    words = [base.reference for base in bases]
    (tmp_path / "list").write_text("\n".join(words))
    process = command(tmp_path, "--from", str(tmp_path / "list"))
    deadline = time.monotonic() + 60
    store = Store.open(tmp_path / "store")
    part = store.download_path(images[3][7:]).with_suffix(".part")
    while (len(store.image_names()) < 3 or not on_disk(part)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    began = time.monotonic()
    status, _, told = ended(process)
    assert time.monotonic() - began < 15
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    assert number == signal.SIGKILL or "the same command resumes" in told
    server.requests.clear()
    server.faults.clear()
    status, _, told = ended(command(tmp_path, "--from", str(tmp_path / "list")))
    assert status == 0, told
    assert "1 images to pull, 3 already here" in told
    assert len(server.paths("/manifests/")) == 1
    [asked] = [headers for path, headers in server.requests if images[3] in path]
    assert asked["range"].startswith("bytes="), "what had come is kept"
    assert not os.listdir(store.root / "downloads")
