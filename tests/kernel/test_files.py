"""File verbs: carried out inside, honest about what is not a regular file."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisandbox.errors import FileAccessError
from minisandbox.sandbox import Sandbox
from minisandbox.types import ImageSpec, Limits

pytestmark = pytest.mark.kernel


def test_text_and_bytes_round_trip(box: Sandbox) -> None:
    box.files.write_text("/testbed/deep/er/a.txt", "héllo\n")
    assert box.files.read_text("/testbed/deep/er/a.txt") == "héllo\n"
    data = bytes(range(256)) * 20_000
    box.files.write_bytes("/testbed/b.bin", data, mode=0o755)
    assert box.files.read_bytes("/testbed/b.bin") == data
    assert box.exec("stat -c '%a %U %s' /testbed/b.bin").stdout == f"755 root {len(data)}\n"


def test_relative_paths_are_below_the_workdir(spec: ImageSpec) -> None:
    from pathlib import PurePosixPath  # noqa: PLC0415

    image = ImageSpec("w", spec.layers, workdir=PurePosixPath("/testbed"))
    with Sandbox.create(image) as box:
        box.files.write_text("x", "1")
        assert box.exec("pwd; cat /testbed/x").stdout == "/testbed\n1"


def test_an_existing_file_is_replaced_and_keeps_its_mode(box: Sandbox) -> None:
    box.exec("echo a long old content > /tmp/f; chmod 600 /tmp/f")
    box.files.write_text("/tmp/f", "new")
    assert box.exec("cat /tmp/f; stat -c %a /tmp/f").stdout == "new600\n"


def test_upload_and_download(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"\0\xff" * 3_000_000)
    box.files.upload(source, "/tmp/up")
    box.files.download("/tmp/up", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "source"]


def test_a_failed_download_leaves_nothing(box: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="No such file"):
        box.files.download("/no/such", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "make", ["mkfifo /tmp/odd", "mkdir /tmp/odd", "ln -s odd /tmp/odd", "ln -s /dev/zero /tmp/odd"]
)
def test_odd_files_are_errors_and_never_hang(box: Sandbox, make: str) -> None:
    box.exec(make).check()
    for verb in (box.files.read_bytes, lambda path: box.files.write_bytes(path, b"x")):
        with pytest.raises(FileAccessError, match="/tmp/odd"):
            verb("/tmp/odd")


def test_links_are_followed_inside_and_lead_nowhere_else(box: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    box.exec(["ln", "-s", str(secret), "/tmp/link"]).check()
    with pytest.raises(FileAccessError):
        box.files.read_bytes("/tmp/link")
    box.exec("echo in > /testbed/target; ln -s /testbed/target /tmp/inner").check()
    assert box.files.read_text("/tmp/inner") == "in\n"


def test_a_size_limit(box: Sandbox) -> None:
    box.exec("truncate -s 5G /tmp/sparse").check()
    with pytest.raises(FileAccessError, match="larger than 1000 bytes"):
        box.files.read_bytes("/tmp/sparse", limit=1000)


def test_a_full_disk_is_said(spec: ImageSpec) -> None:
    with Sandbox.create(spec, limits=Limits(disk="4M")) as box:
        with pytest.raises(FileAccessError, match="No space left"):
            box.files.write_bytes("/testbed/big", b"x" * 8_000_000)
        assert box.exec("echo ok").stdout == "ok\n"


def test_names_that_are_odd(box: Sandbox) -> None:
    for name in ("with space", "quote'\"", "new\nline", "-rf", "caf\udce9", "ünïcode"):
        box.files.write_text(f"/tmp/{name}", name)
        assert box.files.read_bytes(f"/tmp/{name}") == name.encode("utf-8", "surrogateescape")
