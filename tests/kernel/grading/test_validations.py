"""Validating sets: what is kept, what is done again, and that killing the controller changes nothing of the report."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests import waiting

from minisandbox.errors import NotFound, RunError
from minisandbox.grade import Progress, Validated, grade, run_validations, validate
from minisandbox.images import Image, build
from minisandbox.sandbox import Sandbox
from minisandbox.store import ImageRecord, Store
from minisandbox.tasks import Task
from minisandbox.tasks.statuses import read_statuses
from minisandbox.types import Network

pytestmark = pytest.mark.kernel

# 200 in `make test-validations`
VALIDATIONS = int(os.environ.get("MINISANDBOX_TEST_VALIDATIONS", "9"))
DEADLINE = 60.0 + 30.0 * VALIDATIONS  # seconds; for a machine that is slow and busy


# --- killed and gone on with -----------------------------------------------------------------------------------------


def many(smith: Task, number: int) -> list[Task]:
    """Tasks over one image; every fourth is not valid, each time for another reason."""
    odd = (
        {"FAIL_TO_PASS": ("tests/test_add.py::test_zero",), "PASS_TO_PASS": ()},
        {"FAIL_TO_PASS": ("tests/test_add.py::test_add", "tests/test_add.py::test_gone")},
        {"FAIL_TO_PASS": ("tests/test_add.py::test_add", "tests/test_double.py::test_double"), "PASS_TO_PASS": ()},
    )
    return [
        replace(smith, instance_id=f"calc__many-{n}", **(odd[n // 4 % 3] if n % 4 == 3 else {})) for n in range(number)
    ]


def start(place: Path, store: Store, *words: str) -> subprocess.Popen[str]:
    words = ("tasks.jsonl", "--allow-local-sources", "--workers", "8", *words)
    return subprocess.Popen(
        [sys.executable, "-m", "minisandbox", "validate", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place,
        env={**os.environ, "MINISANDBOX_STORE": str(store.root)},
    )  # fmt: skip


def rows(run: Path) -> list[tuple[str, str]]:
    """What the database of a run has, read by another process than the one that writes it."""
    file = run / "results.sqlite"
    if not file.exists():
        return []
    with closing(sqlite3.connect(file, timeout=60)) as database:
        try:
            return database.execute("SELECT id, ended || body FROM results").fetchall()
        except sqlite3.OperationalError:  # it has no table yet
            return []


def report(run: Path) -> object:
    """A run's report without what is measured."""

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key != "measured"}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(json.loads((run / "report.json").read_text()))


@pytest.mark.slow
@pytest.mark.once
def test_killed_three_times_and_gone_on_with_the_report_is_the_same(
    smith: Task, smith_image: Image, store: Store, tmp_path: Path
) -> None:
    tasks = many(smith, VALIDATIONS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))
    with start(tmp_path, store, "-o", "calm") as calm:
        out, err = calm.communicate(timeout=DEADLINE)
    assert calm.returncode == 1, out + err

    cut = tmp_path / "cut"
    before: dict[str, str] = {}
    for kill in range(1, 4):
        with start(tmp_path, store, "-o", "cut") as killed:
            enough = VALIDATIONS * kill // 4
            waiting.until(lambda n=enough: len(rows(cut)) >= n, DEADLINE)  # type: ignore[misc] # n is this round's
            killed.send_signal(signal.SIGKILL)
            killed.communicate(timeout=60)
        assert killed.returncode == -signal.SIGKILL
        now = dict(rows(cut))
        assert before.items() <= now.items(), "what was finished was done again, or lost"
        before = now
    with start(tmp_path, store, "-o", "cut") as last:
        out, err = last.communicate(timeout=DEADLINE)
    assert last.returncode == 1, out + err
    assert before.items() <= dict(rows(cut)).items()
    assert len(rows(cut)) == VALIDATIONS

    assert report(cut) == report(tmp_path / "calm")
    assert read_statuses(cut) == read_statuses(tmp_path / "calm")
    counts = json.loads((cut / "report.json").read_text())["counts"]
    assert counts == {"valid": VALIDATIONS - VALIDATIONS // 4, "invalid": VALIDATIONS // 4, "error": 0}
    assert (cut / "report.md").read_text().count("\n| calc__many-") == VALIDATIONS


@pytest.mark.slow
@pytest.mark.once
def test_ctrl_c_keeps_what_is_finished(smith: Task, smith_image: Image, store: Store, tmp_path: Path) -> None:
    tasks = many(smith, 6)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task.to_row()) + "\n" for task in tasks))
    with start(tmp_path, store, "-o", "run", "--workers", "2") as process:
        waiting.until(lambda: len(rows(tmp_path / "run")) >= 1, DEADLINE)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the same command resumes" in err.splitlines()[-1]
    kept = dict(rows(tmp_path / "run"))
    assert all('"status": "error"' not in body for body in kept.values()), "an interruption is no result"
    with start(tmp_path, store, "-o", "run") as process:
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1, err
    assert kept.items() <= dict(rows(tmp_path / "run")).items()


# --- what is done again ----------------------------------------------------------------------------------------------


class Runs:
    """Validates into one directory, and remembers what was not taken over."""

    def __init__(self, out: Path, image_of: Callable[[Task], Image]) -> None:
        self.out = out
        self.image_of = image_of
        self.anew: list[str] = []

    def __call__(self, tasks: Sequence[Task], **options: bool) -> dict[str, Validated]:
        self.anew = []
        found = run_validations(
            tasks, self.image_of, out=self.out, workers=2, progress=self._note, **options  # type: ignore[arg-type] # flags
        )  # fmt: skip
        return {one.instance_id: one for one in found}

    def _note(self, news: Progress[Validated]) -> None:
        if not news.resumed:
            self.anew.append(news.latest.instance_id)


@pytest.mark.slow
@pytest.mark.once
def test_a_changed_row_or_image_is_validated_anew(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    run = Runs(tmp_path / "run", lambda task: smith_image)
    good, wrong = smith, many(smith, 4)[3]
    found = run([good, wrong])
    assert (found[good.instance_id].status, found[wrong.instance_id].cause) == ("valid", "empty_resolves")
    assert found[good.instance_id].layers
    assert found[wrong.instance_id].log
    assert sorted(run.anew) == sorted((good.instance_id, wrong.instance_id))
    assert run([good, wrong]) == found
    assert run.anew == []
    run([replace(good, grader=replace(good.grader, timeout=61.0)), wrong])
    assert run.anew == [good.instance_id]
    run.image_of = lambda task: replace(smith_image, key="0" * 64)
    run([wrong])
    assert run.anew == [wrong.instance_id]
    assert set(run([good, wrong], only_failed=True)) == {good.instance_id, wrong.instance_id}
    assert run.anew == [wrong.instance_id]
    with pytest.raises(RunError, match="runs"):
        run_validations([good], run.image_of, out=run.out, runs=2)


@pytest.mark.once
def test_what_we_could_not_find_out_is_done_again(smith: Task, smith_image: Image, tmp_path: Path) -> None:
    def missing(task: Task) -> Image:
        raise NotFound("no such image")

    run = Runs(tmp_path / "run", missing)
    one = run([smith])[smith.instance_id]
    assert (one.status, one.cause, one.detail) == ("error", "not_built", "NotFound: no such image")
    run.image_of = lambda task: replace(smith_image, layers=("0" * 64,))
    assert run([smith])[smith.instance_id].cause == "infrastructure"
    run.image_of = lambda task: smith_image
    assert run([smith])[smith.instance_id].valid
    assert run.anew == [smith.instance_id]


def stack(image: ImageRecord) -> frozenset[str]:
    return frozenset((*image.layers, *filter(None, [image.tests_layer])))


@pytest.mark.slow
@pytest.mark.once
def test_rebuild_makes_what_no_other_image_has(bench: Task, smith: Task, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")  # in the one of all workers, what others have may change
    smith_image = build(smith.recipe(), store=store, name=smith.instance_id)
    mine = bench.test_patch + new_file("tests/test_mine.py", "def test_mine():\n    assert True\n")
    task = replace(bench, instance_id="calc__again-1", test_patch=mine)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task.to_row()) + "\n")

    def layers(*words: str) -> dict[str, float]:
        with start(tmp_path, store, "-o", "run", *words) as process:
            _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, err
        return {key: store.layer(key).created for key in stack(store.image(task.instance_id))}

    first, again, rebuilt = layers(), layers(), layers("--rebuild")
    assert again == first
    assert rebuilt.keys() == first.keys()
    others = {key for image in store.images() if image.name != task.instance_id for key in stack(image)}
    assert others >= set(smith_image.layers)
    assert {key for key in first if rebuilt[key] != first[key]} == first.keys() - others
    assert store.image(task.instance_id).tests_layer not in others
    assert len(rows(tmp_path / "run")) == 1


# --- no network ------------------------------------------------------------------------------------------------------

NET = """\
import socket
import urllib.request


def reach(address, port):
    with socket.create_connection((address, port), timeout=5) as peer:
        return peer.recv(5)


if __name__ == "__main__":
    import sys

    print(reach(sys.argv[1], int(sys.argv[2])))
"""
NET_TESTS = """\
import os, socket
import pytest
from net import reach


@pytest.mark.parametrize("address", {addresses!r})
def test_nothing_of_the_host_answers(address):
    with pytest.raises(OSError):
        reach(address, {port})


def test_no_name_is_resolved():
    with pytest.raises(OSError):
        socket.getaddrinfo("localhost.example", 80)


def test_loopback_is_the_only_interface():
    assert [name for _, name in socket.if_nameindex()] == ["lo"]
"""


def own_address() -> str:
    """An address of this machine that is not its loopback's, if there is one. Nothing is sent: a datagram socket."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def new_file(path: str, text: str) -> str:
    lines = text.splitlines()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return head + f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


@pytest.mark.slow
def test_validation_and_grading_have_no_network(bench: Task, images: Callable[[Task], Image]) -> None:
    """The host listens on all its addresses; a sandbox with the host's network reaches it, grading does not."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port, addresses = server.getsockname()[1], ["127.0.0.1", own_address()]
        tests = NET_TESTS.format(addresses=addresses, port=port)
        names = [f"test_nothing_of_the_host_answers[{address}]" for address in addresses]
        names += ["test_no_name_is_resolved", "test_loopback_is_the_only_interface"]
        task = replace(
            bench,
            instance_id="calc__net-1",
            patch=new_file("net.py", NET),
            test_patch=new_file("tests/test_net.py", tests),
            FAIL_TO_PASS=tuple(f"tests/test_net.py::{name}" for name in names),
            PASS_TO_PASS=(),
        )
        image = images(task)
        found = validate(task, image)
        assert found.valid, (found, found.reference[0].log)
        graded = grade(task, image, task.patch.encode())
        assert graded.resolved, graded.log
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()  # nobody has knocked
        server.setblocking(True)

        with Sandbox.create(image.spec(), network=Network.host()) as box:
            box.files.write_text("/testbed/net.py", NET)
            for address in addresses:
                with box.start(["python", "/testbed/net.py", address, str(port)]) as asks:
                    server.settimeout(60)
                    peer, _ = server.accept()
                    with peer:
                        peer.sendall(b"hello")
                    assert asks.wait(60).exit_code == 0, "the same code reaches the host where it may"
