"""The controller's side of the file verbs, fed with bytes: honest ones in any pieces, and hostile ones."""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisandbox.errors import FileAccessError, InvalidValue, SandboxGone
from minisandbox.launch.jobs.frames import Decoder, Header, encode
from minisandbox.sandbox.protocol import file_operations
from minisandbox.sandbox.protocol.host_trees import leaves_tree
from minisandbox.sandbox.protocol.wire import Operation
from minisandbox.types import FileInfo, FileType, SandboxUsage, Transfer

Frame = Header | tuple[Header, bytes]
LIMIT = 10_000


def as_bytes(frames: list[Frame]) -> bytes:
    return b"".join(encode(*frame) if isinstance(frame, tuple) else encode(frame) for frame in frames)


def answer(operation: Operation[Any], *pieces: bytes) -> Any:
    """Drive an operation of one call; the peer sends these pieces and hangs up."""
    try:
        call = next(operation)
        for _ in call.outgoing():
            pass
        for piece in pieces:
            call.feed(piece)
        operation.send(None)
    except StopIteration as end:
        return end.value
    finally:
        operation.close()
    raise AssertionError("a second call")


def asked(operation: Operation[Any]) -> list[tuple[Header, bytes]]:
    """What an operation sends."""
    decoder = Decoder()
    frames = [frame for piece in next(operation).outgoing() for frame in decoder.feed(piece)]
    operation.close()
    return frames


# --- honest answers, in pieces ---------------------------------------------------------------------------------------

CONTENT: list[Frame] = [({"event": "data"}, b"abc"), {"event": "hole", "size": 5}, ({"event": "data"}, b"\xff\0")]
EXPECTED = b"abc" + bytes(5) + b"\xff\0"
ENTRY = ["caf\udce9", stat.S_IFREG | 0o4640, 7, 1_500_000_000, 3, 4, None]
LINK = ["l", stat.S_IFLNK | 0o777, 1, 0, 0, 0, "t"]
TREE: list[Frame] = [
    {"event": "directory", "name": "", "mode": 0o755, "mtime": 7_000_000_000},
    {"event": "file", "name": "f", "mode": 0o640, "mtime": 5_000_000_001},
    *CONTENT,
    {"event": "eof"},
    {"event": "link", "name": "l", "detail": "d/g", "mode": 0o777, "mtime": 3},
    {"event": "skip", "name": "p", "detail": "a FIFO", "mode": 0o644, "mtime": 3},
    {"event": "directory", "name": "d", "mode": 0o700, "mtime": 9},
    {"event": "file", "name": "g", "mode": 0o755, "mtime": 1},
    {"event": "eof"},
    {"event": "skip", "name": "gone", "detail": "gone"},
    {"event": "up"},
    {"event": "up"},
    {"event": "end"},
]


def read_into(sink: io.BytesIO) -> Operation[int]:
    return file_operations.read("f", cwd="/", limit=LIMIT, sink=sink)


def every_cut(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[i : i + 1] for i in range(len(data))]
    for cut in range(1, len(data)):
        yield [data[:cut], data[cut:]]


def test_content_in_any_pieces() -> None:
    for pieces in every_cut(as_bytes([*CONTENT, {"event": "end", "size": 10}])):
        sink = io.BytesIO()
        assert answer(read_into(sink), *pieces) == 10
        assert sink.getvalue() == EXPECTED


def test_a_list_in_any_pieces() -> None:
    data = as_bytes(
        [{"event": "entries", "entries": [LINK]}, {"event": "entries", "entries": [ENTRY]}, {"event": "end"}]
    )
    expected = (
        FileInfo(PurePosixPath("/w/d/caf\udce9"), FileType.FILE, 7, 0o4640, 1.5, 3, 4),
        FileInfo(PurePosixPath("/w/d/l"), FileType.SYMLINK, 1, 0o777, 0.0, 0, 0, "t"),
    )
    for pieces in every_cut(data):
        assert answer(file_operations.list_directory("d", cwd="/w"), *pieces) == expected


def test_a_usage_in_any_pieces() -> None:
    data = as_bytes([{"event": "usage", "cpu": 0.5, "memory": 1, "disk": 2, "processes": 3}])
    for pieces in every_cut(data):
        assert answer(file_operations.usage(), *pieces) == SandboxUsage(0.5, 1, 2, 3)


def test_a_tree_in_any_pieces(tmp_path: Path) -> None:
    data = as_bytes(TREE)
    for number, pieces in enumerate(every_cut(data)):
        local = tmp_path / f"{number}"
        came = answer(file_operations.download("t", local, cwd="/", limit=LIMIT), *pieces)
        assert came == Transfer(2, 10, (("p", "a FIFO"), ("d/gone", "gone")))
        assert (local / "f").read_bytes() == EXPECTED
        assert os.readlink(local / "l") == "d/g"
        assert sorted(os.listdir(local)) == ["d", "f", "l"]
        status = (local / "f").stat()
        assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 5_000_000_001)
        assert local.stat().st_mtime_ns == 7_000_000_000
    assert len(os.listdir(tmp_path)) == number + 1


def test_a_file_arrives_at_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    frames: list[Frame] = [{"event": "file", "name": "", "mode": 0o4600, "mtime": 5}, *CONTENT, {"event": "eof"}]
    operation = file_operations.download("t", tmp_path / "f", cwd="/", limit=None)
    call = next(operation)
    call.feed(as_bytes(frames))
    assert (tmp_path / "f").read_text() == "old"
    call.feed(as_bytes([{"event": "end"}]))
    with pytest.raises(StopIteration):
        operation.send(None)
    assert (tmp_path / "f").read_bytes() == EXPECTED
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o600
    assert os.listdir(tmp_path) == ["f"]


def test_whoever_leaves_early_leaves_nothing(tmp_path: Path) -> None:
    open_files = os.listdir("/proc/self/fd")
    for count in range(len(TREE)):
        operation = file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT)
        next(operation).feed(as_bytes(TREE[:count]))
        operation.close()
        assert os.listdir(tmp_path) == []
        with pytest.raises(SandboxGone, match="cut off"):
            answer(file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT), as_bytes(TREE[:count]))
        assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == len(open_files)


def test_an_error_after_half_a_tree(tmp_path: Path) -> None:
    error: Frame = {
        "event": "error",
        "errno": errno.EFBIG,
        "message": "larger than 9 bytes",
        "operation": "x",
        "path": "t/f",
    }
    for count in range(len(TREE)):
        with pytest.raises(FileAccessError, match="cannot download t/f: larger than 9 bytes") as caught:
            answer(
                file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT), as_bytes([*TREE[:count], error])
            )
        assert (caught.value.path, caught.value.errno) == ("t/f", errno.EFBIG)
        assert os.listdir(tmp_path) == []


# --- hostile answers -------------------------------------------------------------------------------------------------

ROOT: Frame = {"event": "directory", "name": "", "mode": 0o755, "mtime": 0}
FILE: Header = {"event": "file", "name": "f", "mode": 0o644, "mtime": 0}
NAMES = ("", ".", "..", "/", "/etc/passwd", "a/b", "../x", "a\0b", "\ud800", "a/", "\0")


def an_entry(event: str, name: object, **more: object) -> Frame:
    return {"event": event, "name": name, "mode": 0o644, "mtime": 0, "detail": "t", **more}


SIZES: tuple[object, ...] = (-1, 0, LIMIT + 1, 1 << 80, "x", None, 1.5, [])
TARGETS: tuple[object, ...] = (5, [], {})


def tree(*frames: Frame) -> list[Frame]:
    return [ROOT, *frames]


HOSTILE_TREES: list[list[Frame]] = [
    *(tree(an_entry(event, name)) for name in NAMES for event in ("file", "directory", "link", "skip")),
    *([an_entry(event, "x")] for event in ("file", "directory", "link", "skip")),
    *([an_entry(event, "")] for event in ("link", "skip")),
    *(tree(an_entry("file", "f", mode=mode), {"event": "eof"}) for mode in (-1, 0o10000, 1 << 80, "x", None, 0.5)),
    *(tree(an_entry("directory", "f", mtime=mtime)) for mtime in (1 << 94, -(1 << 94), "x", None, float("nan"))),
    *(tree(FILE, {"event": "hole", "size": size}) for size in SIZES),
    [ROOT, FILE, ({"event": "data"}, b"x" * (LIMIT + 1))],
    [ROOT, FILE, ({"event": "data"}, b"x" * LIMIT), ({"event": "data"}, b"x")],
    [ROOT, ({"event": "data"}, b"x")],
    [ROOT, {"event": "hole", "size": 1}],
    [ROOT, {"event": "eof"}],
    [ROOT, FILE, {"event": "eof"}, {"event": "eof"}],
    [ROOT, FILE, {"event": "eof"}, ({"event": "data"}, b"x")],
    [ROOT, FILE, FILE],
    [ROOT, FILE, ROOT],
    [ROOT, FILE, {"event": "up"}],
    [ROOT, FILE, {"event": "end"}],
    [ROOT, FILE, an_entry("skip", "s")],
    [ROOT, FILE, {"event": "eof"}, FILE],
    [ROOT, FILE, {"event": "eof"}, an_entry("directory", "f")],
    [ROOT, FILE, {"event": "eof"}, an_entry("link", "f")],
    [ROOT, an_entry("directory", "d"), {"event": "up"}, an_entry("directory", "d")],
    [ROOT, an_entry("link", "d", detail="."), an_entry("directory", "d")],
    [ROOT, an_entry("link", "f", detail="g"), FILE],
    [ROOT, an_entry("link", "l", detail=5)],
    [ROOT, an_entry("link", "l", detail="\ud800")],
    [ROOT, an_entry("skip", "l", detail=None)],
    [ROOT, an_entry("file", 5)],
    [ROOT, {"event": "file"}],
    [ROOT, ROOT],
    [ROOT, {"event": "up"}, {"event": "up"}],
    [ROOT, {"event": "up"}, ROOT],
    [ROOT, {"event": "up"}, an_entry("directory", "d")],
    [ROOT, {"event": "up"}, {"event": "end"}, {"event": "end"}],
    [ROOT, {"event": "end"}],
    [{"event": "end"}],
    [{"event": "up"}],
    [{"event": "done"}],
    [{"event": ["end"]}],
    [{"event": None}],
    [{}],
    [({"event": "directory", "name": "", "mode": 0, "mtime": 0}, b"x" * ((1 << 20) + 1))],
]


@pytest.mark.parametrize("number", range(len(HOSTILE_TREES)))
def test_hostile_trees(tmp_path: Path, number: int) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(SandboxGone, match=r"malformed"):
        answer(file_operations.download("t", tmp_path / "in/t", cwd="/", limit=LIMIT), as_bytes(HOSTILE_TREES[number]))
    assert os.listdir(tmp_path) == ["in"]
    assert os.listdir(tmp_path / "in") == []


def test_dates_that_no_file_here_can_have(tmp_path: Path) -> None:
    """A file system may have later times than utime(2) sets: the file comes, with the last time there is."""
    for number, mtime in enumerate((1 << 70, -(1 << 70))):
        file: Header = {**FILE, "mtime": mtime}
        frames: list[Frame] = [ROOT, file, {"event": "eof"}, {"event": "up"}, {"event": "end"}]
        answer(file_operations.download("t", tmp_path / f"{number}", cwd="/", limit=LIMIT), as_bytes(frames))
        assert (tmp_path / f"{number}/f").read_bytes() == b""


def test_endless_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.sandbox.protocol.host_trees.MOST_ENTRIES", 100)
    for event in ("directory", "skip", "link"):
        frames = [ROOT, *(an_entry(event, f"{number}", detail="/x") for number in range(101))]
        with pytest.raises(SandboxGone, match="more entries"):
            answer(file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT), as_bytes(frames))
    assert os.listdir(tmp_path) == []


def test_endless_names_of_what_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisandbox.sandbox.protocol.host_trees._MOST_SKIPPED", 1000)
    frames = [ROOT, *(an_entry("skip", f"{number:0255}") for number in range(5))]
    with pytest.raises(FileAccessError, match="too many"):
        answer(file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT), as_bytes(frames))


def test_endless_depth(tmp_path: Path) -> None:
    frames = [ROOT, *([an_entry("directory", "d")] * 4000)]
    with pytest.raises(FileAccessError, match="deep"):
        answer(file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT), as_bytes(frames))
    assert os.listdir(tmp_path) == []


def test_the_destination_appears_meanwhile(tmp_path: Path) -> None:
    operation = file_operations.download("t", tmp_path / "t", cwd="/", limit=LIMIT)
    next(operation).feed(as_bytes(TREE))
    (tmp_path / "t").mkdir()
    with pytest.raises(FileExistsError, match="meanwhile"):
        operation.send(None)
    assert os.listdir(tmp_path) == ["t"]
    assert os.listdir(tmp_path / "t") == []


def test_the_place_of_the_copy_is_held(tmp_path: Path) -> None:
    """Its directory is open: moving it away or putting a link in its place changes nothing."""
    (tmp_path / "in").mkdir()
    (tmp_path / "victim").mkdir()
    operation = file_operations.download("t", tmp_path / "in/t", cwd="/", limit=LIMIT)
    call = next(operation)
    call.feed(as_bytes(TREE[:3]))
    (tmp_path / "in").rename(tmp_path / "moved")
    (tmp_path / "in").symlink_to("victim")
    call.feed(as_bytes(TREE[3:]))
    with pytest.raises(StopIteration):
        operation.send(None)
    assert os.listdir(tmp_path / "victim") == []
    assert os.listdir(tmp_path / "moved") == ["t"]


HOSTILE_CONTENT: list[list[Frame]] = [
    [({"event": "data"}, b"x" * (LIMIT + 1))],
    [({"event": "data"}, b"x" * LIMIT)] * 2,
    [{"event": "hole", "size": LIMIT + 1}],
    [{"event": "hole", "size": -1}],
    [{"event": "hole", "size": "1"}],
    [{"event": "hole"}],
    [{"event": "done"}],
    [{"event": "end"}, ({"event": "data"}, b"x")],
    [{"event": "end"}, {"event": "error"}],
    [({"event": "data"}, b"x" * ((1 << 20) + 1))],
    [{"size": 1}],
]


@pytest.mark.parametrize("number", range(len(HOSTILE_CONTENT)))
def test_hostile_content(number: int) -> None:
    sink = io.BytesIO()
    with pytest.raises(SandboxGone, match=r"malformed"):
        answer(read_into(sink), as_bytes(HOSTILE_CONTENT[number]))
    assert len(sink.getvalue()) <= LIMIT


HOSTILE_ENTRIES: list[object] = [
    *([name, *ENTRY[1:]] for name in (*NAMES, 5, None)),
    [],
    ENTRY[:6],
    [*ENTRY, 1],
    *(["f", mode, *ENTRY[2:]] for mode in (0, -1, "x", None, 1 << 80, 0o777)),
    *([*ENTRY[:2], size, *ENTRY[3:]] for size in (-1, 1.5, "x", 1 << 80)),
    *([*ENTRY[:3], mtime, *ENTRY[4:]] for mtime in ("x", None, 1 << 5000)),
    *([*ENTRY[:6], target] for target in TARGETS),
    "entry",
    {"name": "x"},
]


@pytest.mark.parametrize("number", range(len(HOSTILE_ENTRIES)))
def test_hostile_entries(number: int) -> None:
    page: Frame = {"event": "entries", "entries": [HOSTILE_ENTRIES[number]]}
    with pytest.raises(SandboxGone, match=r"malformed"):
        answer(file_operations.list_directory("/", cwd="/"), as_bytes([page, {"event": "end"}]))
    if HOSTILE_ENTRIES[number] != ["", *ENTRY[1:]]:
        with pytest.raises(SandboxGone, match=r"malformed"):
            answer(file_operations.stat("/", cwd="/"), as_bytes([page]))


def test_a_list_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_operations, "MOST_ENTRIES", 10)
    page: Frame = {"event": "entries", "entries": [ENTRY] * 6}
    with pytest.raises(SandboxGone, match="more entries"):
        answer(file_operations.list_directory("/", cwd="/"), as_bytes([page, page]))
    with pytest.raises(SandboxGone, match="more entries"):
        answer(file_operations.stat("/", cwd="/"), as_bytes([page]))
    with pytest.raises(SandboxGone, match=r"malformed"):
        answer(file_operations.stat("/", cwd="/"), as_bytes([{"event": "entries", "entries": []}]))


@pytest.mark.parametrize(
    "usage",
    [
        {"cpu": -1.0}, {"cpu": float("nan")}, {"cpu": float("inf")}, {"cpu": "1"}, {"memory": -1}, {"disk": 1.5},
        {"processes": None}, {"event": "done"},
    ],
)  # fmt: skip
def test_hostile_usage(usage: Header) -> None:
    honest: Header = {"event": "usage", "cpu": 0.5, "memory": 1, "disk": 2, "processes": 3}
    with pytest.raises(SandboxGone, match=r"malformed"):
        answer(file_operations.usage(), as_bytes([{**honest, **usage}]))


VERBS: dict[str, Callable[[Path], Operation[Any]]] = {
    "read": lambda _: file_operations.read("p", cwd="/", limit=LIMIT, sink=io.BytesIO()),
    "write": lambda _: file_operations.write("p", cwd="/", mode=None, source=[b"x"]),
    "list": lambda _: file_operations.list_directory("p", cwd="/"),
    "stat": lambda _: file_operations.stat("p", cwd="/"),
    "exists": lambda _: file_operations.exists("p", cwd="/"),
    "mkdir": lambda _: file_operations.make_directory("p", cwd="/"),
    "remove": lambda _: file_operations.remove("p", cwd="/"),
    "move": lambda _: file_operations.move("p", "q", cwd="/"),
    "upload": lambda here: file_operations.upload(here, "p", cwd="/"),
    "upload file": lambda here: file_operations.upload(here / "file", "p", cwd="/"),
    "download": lambda here: file_operations.download("p", here / "new", cwd="/", limit=LIMIT),
    "usage": lambda _: file_operations.usage(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_went_wrong(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SandboxGone, match="cut off"):
        answer(VERBS[verb](tmp_path))
    error: Frame = {"event": "error", "errno": errno.EACCES, "message": "no" * 5000, "path": "p", "operation": verb}
    with pytest.raises(FileAccessError, match="no") as caught:
        answer(VERBS[verb](tmp_path), as_bytes([error]))
    assert (caught.value.errno, caught.value.path) == (errno.EACCES, "p")
    assert len(str(caught.value)) < 3000
    with pytest.raises(FileAccessError) as caught:
        answer(VERBS[verb](tmp_path), as_bytes([{"event": "error", "errno": "x", "message": None}]))
    assert caught.value.errno is None
    for data in (b"\xff" * 100, as_bytes([{"event": "nonsense"}]), as_bytes([{}]), b"\0\0\0\2\0\0\0\0[]"):
        with pytest.raises(SandboxGone, match=r"malformed"):
            answer(VERBS[verb](tmp_path), data)
    assert os.listdir(tmp_path) == ["file"]


EVENTS = st.sampled_from(["directory", "file", "link", "skip", "up", "eof", "data", "hole", "end"])
VALUES = st.one_of(st.integers(-5, 70_000), st.sampled_from([*NAMES, "a", "b", "c", "../a", "/x", None]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, VALUES, VALUES, VALUES), max_size=12))
def test_any_frames_stay_where_they_belong(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, object, object, object]]
) -> None:
    here = tmp_path_factory.mktemp("any")
    (here / "in").mkdir()
    frames: list[Frame] = [ROOT]
    for event, name, number, detail in steps:
        payload = b"x" * 10 if event == "data" else b""
        frames.append(
            ({"event": event, "name": name, "mode": number, "mtime": 0, "size": number, "detail": detail}, payload)
        )
    try:
        answer(file_operations.download("t", here / "in/t", cwd="/", limit=LIMIT), as_bytes(frames))
    except (SandboxGone, FileAccessError):
        assert os.listdir(here / "in") == []
    else:
        assert os.listdir(here / "in") == ["t"]
        for path in (here / "in/t").rglob("*"):
            assert not path.is_symlink() or path.resolve(strict=False).is_relative_to(here / "in/t")
    assert os.listdir(here) == ["in"]


# --- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "depth", "kept"),
    [
        ("a", 0, True), ("a/b/c", 0, True), (".", 0, True), ("./a//b/", 0, True), ("../a", 1, True), ("..", 1, True),
        ("../../a", 2, True), (".././../a", 2, True), ("...", 0, True), ("..a/..b", 0, True),
        ("..", 0, False), ("../../a", 1, False), ("a/../b", 5, False), ("a/..", 5, False), ("/a", 5, False),
        ("/", 5, False), ("", 5, False), ("a\0b", 5, False), ("./../a", 0, False),
    ],
)  # fmt: skip
def test_which_links_are_kept(target: str, depth: int, kept: bool) -> None:
    assert (leaves_tree(target, depth) == "") is kept


# --- what is asked ---------------------------------------------------------------------------------------------------


def test_what_is_written_goes_in_pieces() -> None:
    frames = asked(file_operations.write("f", cwd="/w", mode=0o600, source=[b"a" * 2_500_000, b"", b"b"]))
    assert frames[0][0] == {"verb": "write", "path": "f", "cwd": "/w", "mode": 0o600, "mtime": None}
    assert frames[-1][0] == {"event": "end"}
    assert max(len(payload) for _, payload in frames) <= 1 << 20
    assert b"".join(payload for _, payload in frames) == b"a" * 2_500_000 + b"b"


def test_a_tree_is_sent_in_order(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"x" * 3_000_000)
    (tmp_path / "l").symlink_to("/etc")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    os.mkfifo(tmp_path / "p")
    frames = asked(file_operations.upload(tmp_path, "t", cwd="/"))
    assert frames[0][0]["verb"] == "take_tree"
    events = [str(header["event"]) for header, _ in frames[1:]]
    assert sorted(events[: events.index("directory")]) == ["eof", "file", "hole", "link"]
    assert events[events.index("directory") :] == ["directory", "file", "data", "data", "data", "eof", "up", "end"]
    assert max(len(payload) for _, payload in frames) <= 1 << 20
    assert {"event": "hole", "size": 1 << 40} in [header for header, _ in frames]


def test_arguments_that_cannot_be_used(tmp_path: Path) -> None:
    operations: list[Operation[Any]] = [
        file_operations.stat("a\0b", cwd="/"),
        file_operations.move("a", "\ud800", cwd="/"),
        file_operations.make_directory("a", cwd="/", mode=0o10000),
        file_operations.write("a", cwd="/", mode=True, source=[]),
        file_operations.upload(tmp_path, "a", cwd="/", mode=0o644),
        file_operations.download("a", Path("/"), cwd="/", limit=None),
    ]
    for operation in operations:
        with pytest.raises(InvalidValue):
            next(operation)
    assert os.listdir(tmp_path) == []
