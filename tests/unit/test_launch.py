"""The launcher's pure parts: plans, frames, kept output."""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.errors import InvalidValue, SandboxCreationError
from minisandbox.launch import plan as p
from minisandbox.launch import zygote
from minisandbox.launch.jobs.exec import Capture
from minisandbox.launch.jobs.frames import Decoder, FrameError, encode
from minisandbox.launch.kernel import syscalls
from minisandbox.sandbox.launcher import Launcher
from minisandbox.sandbox.plans import SandboxRequest, make_plan, usual_preparations
from minisandbox.sandbox.run import SandboxRun
from minisandbox.types import ImageSpec, Limits, Mount, Network
from minisandbox.values import parse_size


def request(**changes: object) -> SandboxRequest:
    values: dict[str, object] = {
        "image": ImageSpec("i", (Path("/store/one"), Path("/store/two"))),
        "limits": Limits(),
        "network": Network.off(),
        "mounts": (Mount(Path("/given"), PurePosixPath("/run/x")),),
        "hostname": "sandbox",
        "upper": None,
        "writable_usr": True,
    }
    return SandboxRequest(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("writable_usr", [True, False])
@pytest.mark.parametrize("upper", [None, Path("/upper")])
def test_a_plan_survives_serialisation(writable_usr: bool, upper: Path | None) -> None:
    plan = replace(make_plan(request(writable_usr=writable_usr, upper=upper)), one_id=False)  # for the zygote alone
    assert p.Plan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(p.Plan.from_json(plan.to_json()))


@pytest.mark.parametrize(
    "text",
    [b"{}", b"[]", b"[]\n{}", b"[]\nnull", b'[["Nope"]]\n{}', b'[]\n{"takes":[],"operations":[["Scratch"]]}', b"x"],
)
def test_what_is_not_a_plan_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own message is good enough here
        p.Plan.from_json(text)


def test_host_paths_appear_only_where_they_are_taken() -> None:
    plan = make_plan(request(upper=Path("/upper")))
    assert {Path("/store/one"), Path("/store/two"), Path("/upper")} <= {
        Path(take.source) for take in plan.takes if isinstance(take, p.Take)
    }
    for operation in (*plan.preparations, *plan.operations):
        assert "/store" not in repr(operation)
        assert "/upper" not in repr(operation)
    assert isinstance(plan.operations[-1], p.Enter)


@pytest.mark.parametrize("upper", [None, Path("/upper")])
def test_what_is_prepared_is_the_same_for_every_plan_that_is_not_in_the_hosts_network(upper: Path | None) -> None:
    prepared = usual_preparations()
    for network in (Network.off(), Network.allow("example.org")):
        plan = make_plan(request(upper=upper, network=network, limits=Limits(disk="64M")))
        assert plan.to_json().partition(b"\n")[0] == prepared
        assert p.unpack_operations(prepared) == plan.preparations
        assert p.Resize(64 << 20) in plan.operations
    assert make_plan(request(hostname="other")).to_json().partition(b"\n")[0] != prepared


@pytest.mark.parametrize(("most", "own"), [(-1, 1024), (1 << 20, 1024), (1030, 838), (100, 1)])
@pytest.mark.parametrize("enforcement", [{}, {"processes": "cgroup v2"}], ids=["rlimits", "groups"])
def test_a_sandbox_leaves_others_some_of_a_users_processes(
    monkeypatch: pytest.MonkeyPatch, enforcement: dict[str, str], most: int, own: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    rlimits = dict(make_plan(request(hostname=f"of-{most}", enforcement=enforcement)).rlimits)
    assert rlimits.get("NPROC") == (None if enforcement and own == 1024 else own)


def test_the_topmost_layer_comes_first() -> None:
    overlay = next(op for op in make_plan(request()).operations if isinstance(op, p.Overlay))
    assert overlay.lowers == ("layers/1", "layers/0")


def test_a_plan_describes_itself() -> None:
    text = make_plan(request()).describe()
    assert text.startswith("1. make a scratch tmpfs of 2147483648 bytes")
    assert "take /store/one as 0 (ro, owners: image)" in text
    assert "network: off" in text
    assert "NPROC=1024" in text


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()), st.binary(), st.integers(1, 50))
def test_frames_survive_any_split(header: dict[str, object], payload: bytes, step: int) -> None:
    data = encode(header, payload) * 2
    decoder = Decoder()
    found: list[tuple[dict[str, object], bytes]] = []
    for start in range(0, len(data), step):
        found += decoder.feed(data[start : start + step])
    assert found == [(header, payload)] * 2


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\0\0\0\1\0\0\0\0x", b"\0\0\0\2\0\0\0\0[]"])
def test_what_is_not_a_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(Decoder().feed(data))


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 60))
def test_capture_keeps_head_and_tail_and_counts_the_rest(pieces: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for piece in pieces:
        capture.add(piece)
    whole, result = b"".join(pieces), capture.result()
    assert capture.dropped == max(0, len(whole) - limit)
    if not capture.dropped:
        assert result == whole
        return
    assert result.startswith(whole[: limit // 2])
    assert result.endswith(whole[len(whole) - (limit - limit // 2) :])
    assert b"[... %d bytes dropped ...]" % capture.dropped in result


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("1K", 1024), ("1.5G", 3 << 29), ("64KiB", 65536), ("2 GB", 2 << 30), (7, 7)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1X", "1e3", -1, True, None, 1.5])
def test_what_is_not_a_size(text: int | str) -> None:
    with pytest.raises(InvalidValue):
        parse_size(text)


def test_limits_refuse_nonsense() -> None:
    for options in (
        {"processes": 0},
        {"processes": 1 << 70},  # setrlimit(2) takes 64 bits
        {"processes": True},
        {"open_files": -1},
        {"open_files": 15},
        {"disk": "lots"},
        {"disk": 0},  # no limit at all, for a tmpfs
        {"disk": "99999999T"},
        {"file_size": 1 << 63},
        {"lifetime": 0},
        {"lifetime": -1.0},
        {"lifetime": float("nan")},
        {"lifetime": float("inf")},
    ):
        with pytest.raises(InvalidValue):
            Limits(**options)


def test_a_mount_of_several_directories_shows_one_over_the_other() -> None:
    mount = Mount(Path("/top"), PurePosixPath("/run/x"), below=(Path("/bottom"), Path("/middle")))
    plan = make_plan(request(mounts=(mount,)))
    taken = {op.slot: op.source for op in plan.takes if isinstance(op, p.Take)}
    shown = next(op for op in plan.operations if isinstance(op, p.Overlay) and op.path == "mounts/0")
    attached = {op.path: op.slot for op in plan.operations if isinstance(op, p.Attach)}
    order = [taken[attached[lower]] for lower in shown.lowers if attached.get(lower)]
    assert order == ["/", "/middle", "/bottom"]  # nothing is at /top here: the directory of a file


def test_a_descriptor_that_cannot_be_sent_is_closed() -> None:
    """A user's sandbox can leave so many under way that no more may be sent."""
    control, other = socket.socketpair()
    other.close()
    inside, outside = os.pipe()
    with control, pytest.raises(BrokenPipeError):
        zygote._hand_out(control, inside)
    with pytest.raises(BrokenPipeError):
        os.write(outside, b".")
    os.close(outside)


def test_a_request_that_is_too_long_ends_no_other_sandbox() -> None:
    """One with some thousands of mounts is."""
    made = Launcher.__new__(Launcher)
    made._lock, made._numbers, made._forgotten = threading.Lock(), itertools.count(1), deque()
    made.enforcement = {"processes": "rlimit"}
    mounts = tuple(Mount(Path("/given", "x" * 200), PurePosixPath(f"/run/{number}")) for number in range(5000))
    made._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with made._connection, other:
        with pytest.raises(SandboxCreationError, match=r"Message too long.*fewer mounts"):
            made.create(make_plan(request(mounts=mounts)), other, other)
        other.send(json.dumps({"event": "held", "to": 1, "number": 7}).encode())
        assert made.hold(0) == 7


def test_what_a_signals_handler_raises_does_not_say_that_a_sandbox_is_late() -> None:
    class Interrupted:
        def recvmsg(self, *_: object) -> NoReturn:
            raise TimeoutError("an alarm")

    made = SandboxRun.__new__(SandboxRun)
    made._name, made._control = "box", Interrupted()  # type: ignore[assignment] # all that is asked of it
    with pytest.raises(TimeoutError, match="an alarm"):
        made._receive()


def test_paths_are_opened_while_other_processes_rename(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    rename = "import os, sys\nwhile True: os.mkdir('x'); os.rename('x', 'y'); os.rmdir('y')"
    with subprocess.Popen([sys.executable, "-c", rename], cwd=tmp_path) as renaming:
        root = os.open(tmp_path, os.O_PATH)
        try:
            for _ in range(20_000):  # without another try, about ten fail
                os.close(syscalls.openat2(root, "a/../a/../a/b/../../a", os.O_PATH, syscalls.RESOLVE_AS_ROOT))
        finally:
            os.close(root)
            renaming.kill()
