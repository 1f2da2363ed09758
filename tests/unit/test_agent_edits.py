"""The edit tool, in a fake sandbox (which isolates nothing: paths are relative)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.agent_tools import in_session

from minisandbox.agents import Create, Edit, Insert, Session, StrReplace, View
from minisandbox.agents.edits import MAX_FILE, command_of, edit_of
from minisandbox.types import ExecResult


def edit(what: Edit, **files: bytes) -> tuple[ExecResult, dict[str, bytes]]:
    """Carry out an edit where there are these files; returns what it says, and the files then."""

    async def body(session: Session) -> tuple[ExecResult, dict[str, bytes]]:
        result = await session.edit(what)
        assert session.record.steps[-1].result == result
        found = await session.box.files.list()
        return result, {one.path.name: await session.box.files.read_bytes(one.path.name) for one in found}

    return in_session(body, files=list(files.items()))


def test_a_view_numbers_lines() -> None:
    result, _ = edit(View("a"), a=b"one\ntwo\x0c\xe2\x80\xa8\n\n")
    assert result.ok
    assert result.stdout == "     1\tone\n     2\ttwo\x0c\u2028\n     3\t"
    assert edit(View("a", (2, 2)), a=b"1\n2\n3")[0].stdout == "     2\t2"
    assert edit(View("a", (2, -1)), a=b"1\n2\n3")[0].stdout == "     2\t2\n     3\t3"
    assert edit(View("a", (3, 99)), a=b"1\n2\n3")[0].stdout == "     3\t3"
    assert edit(View("a"), a=b"")[0].stdout == "a is empty"


@pytest.mark.parametrize("lines", [(0, 1), (4, 5), (3, 2), (-1, -1), (1, -2)])
def test_lines_that_are_not_there(lines: tuple[int, int]) -> None:
    result, _ = edit(View("a", lines), a=b"1\n2\n3\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"lines {lines[0]} to {lines[1]}: a has lines 1 to 3" in result.stderr


def test_a_view_of_a_directory() -> None:
    async def body(session: Session) -> tuple[str, str, str]:
        await session.box.files.write_bytes("d/e/f", b"")
        await session.box.files.mkdir("empty")
        names = (await session.edit(View("d"))).stdout, (await session.edit(View("empty"))).stdout
        return *names, (await session.edit(View("d", (1, 2)))).stderr

    assert in_session(body) == ("e/", "an empty directory", "d is a directory: it has no lines")


def test_a_file_is_made_once() -> None:
    async def body(session: Session) -> tuple[ExecResult, bytes]:
        return await session.edit(Create("n/m/a", "text")), await session.box.files.read_bytes("n/m/a")

    result, data = in_session(body)
    assert (result.stdout, data) == ("n/m/a was created, with 1 lines", b"text\n")
    result, files = edit(Create("a", "new"), a=b"old")
    assert "exists already" in result.stderr
    assert files == {"a": b"old"}


@pytest.mark.parametrize(("text", "data"), [("", b""), ("x", b"x\n"), ("x\n", b"x\n"), ("\u00e4\n\n", b"\xc3\xa4\n\n")])
def test_what_a_new_file_holds(text: str, data: bytes) -> None:
    assert edit(Create("a", text))[1] == {"a": data}


def test_a_text_is_replaced() -> None:
    lines = "".join(f"line {number}\n" for number in range(1, 21)).encode()
    result, files = edit(StrReplace("a", "line 10\n", "ten\nand a half\n"), a=lines)
    assert files == {"a": lines.replace(b"line 10\n", b"ten\nand a half\n")}
    shown = result.stdout.splitlines()
    assert shown[0] == "a was changed:"
    assert shown[1].split() == ["6", "line", "6"]
    assert "    10\tten" in shown
    assert "    11\tand a half" in shown
    assert edit(StrReplace("a", "all\n"), a=b"all\n")[1] == {"a": b""}
    assert edit(StrReplace("a", "\\1 $x", "\\g<0>"), a=b"\\1 $x")[1] == {"a": b"\\g<0>"}


def test_a_text_that_is_not_there() -> None:
    result, files = edit(StrReplace("a", "x", "y"), a=b"X")
    assert "does not hold the old text" in result.stderr
    assert files == {"a": b"X"}
    assert r"\r\n" in edit(StrReplace("a", "x\ny", "z"), a=b"x\r\ny\r\n")[0].stderr


def test_a_text_that_is_there_several_times() -> None:
    result, files = edit(StrReplace("a", "x", "y"), a=b"x\n\nxx\n")
    assert "at lines 1, 3, 3" in result.stderr
    assert files == {"a": b"x\n\nxx\n"}
    assert "10, ...; take in" in edit(StrReplace("a", "x", "y"), a=b"x\n" * 100_000)[0].stderr


def test_bytes_that_are_not_utf_8_stay() -> None:
    result, files = edit(StrReplace("a", "x", "\u20ac"), a=b"\xff x \xe4\r\n")
    assert files == {"a": b"\xff \xe2\x82\xac \xe4\r\n"}
    assert "\ufffd \u20ac \ufffd" in result.stdout


@pytest.mark.parametrize(
    ("text", "line", "new", "expected"),
    [
        (b"a\nb\n", 0, "x", b"x\na\nb\n"),
        (b"a\nb\n", 1, "x\ny\n", b"a\nx\ny\nb\n"),
        (b"a\nb\n", 2, "x", b"a\nb\nx\n"),
        (b"a\nb", 2, "x", b"a\nb\nx\n"),
        (b"a\n\nb\n", 2, "x", b"a\n\nx\nb\n"),
        (b"", 0, "x", b"x\n"),
        (b"a", 1, "", b"a\n"),
        (b"\n", 1, "x", b"\nx\n"),
    ],
)
def test_lines_are_inserted(text: bytes, line: int, new: str, expected: bytes) -> None:
    assert edit(Insert("a", line, new), a=text)[1] == {"a": expected}


@pytest.mark.parametrize("line", [-1, 3])
def test_lines_are_inserted_where_there_are_lines(line: int) -> None:
    result, files = edit(Insert("a", line, "x"), a=b"a\nb\n")
    assert "a has lines 1 to 2" in result.stderr
    assert files == {"a": b"a\nb\n"}


@pytest.mark.parametrize("what", [View("a"), StrReplace("a", "x", "y"), Insert("a", 0, "x")])
def test_files_that_cannot_be_edited(what: Edit) -> None:
    assert "No such file" in edit(what)[0].stderr
    assert "binary" in edit(what, a=b"x\0")[0].stderr
    assert "cannot read" in edit(what, a=b"x" * (MAX_FILE + 1))[0].stderr


def test_files_do_not_grow_without_end() -> None:
    whole = b"x\n" + b"y" * (MAX_FILE - 2)
    result, files = edit(StrReplace("a", "x", "xx"), a=whole)
    assert "would have more than" in result.stderr
    assert files == {"a": whole}


def test_what_is_no_regular_file() -> None:
    async def body(session: Session) -> list[str]:
        await session.box.exec("mkdir d; mkfifo f; ln -s f l; ln -s loop loop")
        whats = (View("f"), View("l"), View("loop"), StrReplace("d", "x", "y"), Create("d", "x"), Create("f/x", "y"))
        return [(await session.edit(what)).stderr for what in whats]

    told = in_session(body)
    assert all(told), told


def test_a_directory_with_many_files() -> None:
    async def body(session: Session) -> str:
        await session.box.exec("mkdir d; cd d; touch {1..1200}")
        return (await session.edit(View("d"))).stdout

    told = in_session(body).splitlines()
    assert (len(told), told[-1]) == (1001, "... and 200 more")


def test_names_that_are_not_utf_8() -> None:
    async def body(session: Session) -> str:
        await session.box.exec(r"mkdir d; touch d/$'\xff'")
        return (await session.edit(View("d"))).stdout

    assert in_session(body) == "\ufffd"


def test_edits_are_recorded_so_that_they_can_be_replayed() -> None:
    what = StrReplace("a", "\u00e4", "b\n")
    assert edit_of(command_of(what)) == what
    for command in ["ls", ("ls", "-l"), ("str_replace_editor", "{"), ("str_replace_editor", "[]"), ("bash", "{}"),
                    ("str_replace_editor", "{}"), ["str_replace_editor", "{}"]]:  # fmt: skip
        assert edit_of(command) is None


def test_the_host_looks_at_no_path(tmp_path: Path) -> None:
    """A path is the sandbox's business alone: for the host, not even its form matters."""
    assert not edit(View(f"{os.fsdecode(bytes(tmp_path))}/../../none"))[0].ok
