"""`make test-kernels`: what it runs, which kernel it takes, what it says where programs are missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conformance import contract
from tools.kernels import __main__ as command
from tools.kernels import disks, machine
from tools.kernels.debian import Archive, MissingError

ROOT = Path(__file__).resolve().parents[2]
NAMES = """
linux-image-6.12-cloud-amd64
linux-image-6.12.95+deb12-cloud-amd64
linux-image-6.12.101+deb12-cloud-amd64
linux-image-6.12.90+deb12.1-cloud-amd64
linux-image-6.12.200+deb12-cloud-amd64-unsigned
linux-image-6.12.200+deb12-rt-amd64
"""
NAMES_OF_6_1 = "linux-image-6.1.0-9-cloud-amd64\nlinux-image-6.1.0-56-cloud-amd64"


def test_the_tests_of_the_list_are_there() -> None:
    assert [path for path in command.TESTS if not (ROOT / path.partition("::")[0]).is_file()] == []
    assert set(command.TOPICS) <= set(contract.TOPICS)


@pytest.mark.parametrize(
    ("series", "names", "newest"),
    [
        ("6.12", NAMES, "linux-image-6.12.101+deb12-cloud-amd64"),
        (
            "6.1",
            NAMES_OF_6_1,
            "linux-image-6.1.0-56-cloud-amd64",
        ),
    ],
)
def test_the_newest_kernel_is_found_by_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, series: str, names: str, newest: str
) -> None:
    monkeypatch.setattr(Archive, "_apt", lambda *_: names)
    assert Archive("http://archive", tmp_path).newest_kernel(series) == newest
    with pytest.raises(MissingError, match=r"no cloud kernel 5\.10"):
        Archive("http://archive", tmp_path).newest_kernel("5.10")


def test_missing_programs_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("cpio", "busybox") else f"/bin/{name}")
    assert command.main(["--cache", str(tmp_path / "cache"), "6.12"]) == 2
    assert "apt-get install --no-install-recommends busybox-static cpio\n" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    left = tmp_path / f"{disks._BUILDING}x"
    left.mkdir()
    with command._locked(tmp_path):
        assert not left.exists()  # of an interrupted run
        with pytest.raises(MissingError, match="another run"), command._locked(tmp_path):
            pass


def test_a_machine_ends_in_time_and_tells_how_its_tests_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guest = "import time; print('2 passed'); print('status root 0', flush=True); time.sleep(600)"
    monkeypatch.setattr(machine, "_command", lambda *_, **__: [sys.executable, "-c", guest])
    kernel = disks.Kernel("linux-image", tmp_path)
    ended = machine.run(kernel, tmp_path / "root", tmp_path / "checkout", tmp_path / "console", seconds=5)
    assert (ended.statuses, capsys.readouterr().out) == ({"root": 0}, "2 passed\n")
    assert ended.last_lines == {"root": "2 passed"}


def test_scripts_of_the_machine_parse() -> None:
    subprocess.run(["bash", "-n", ROOT / "tools/kernels/guest-init"], check=True)
    subprocess.run(["sh", "-n", ROOT / "tools/kernels/initrd-init"], check=True)
