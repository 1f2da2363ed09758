"""Lock files and pins: written, read, compared; listings of other tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minisandbox.errors import InvalidValue, NotFound, StoreError
from minisandbox.images import lock_of, read_lock, read_pins
from minisandbox.images.python.lock import PACKAGES, packages_fact
from minisandbox.spec import Lock, Package
from minisandbox.store import LayerRecord
from minisandbox.values import JSONValue

LOCK = Lock(
    image='odd "name"',
    base="b" * 64,
    python={"version": "3.11.7", "build": "3.11.7 (main)\n[GCC]", "abi": "cpython-311", "kind": "copy"},
    system={"gcc": "4:12.2.0-3"},
    installed={"attrs": "23.1.0"},
    steps={"requirements": (Package("attrs", "23.1.0", "attrs-23.1.0-py3-none-any.whl", "a" * 64),)},
)


def _record(key: str, kind: str, facts: dict[str, str], **step: JSONValue) -> LayerRecord:
    return LayerRecord(key, None, {"kind": kind, **step}, 1.0, 1, 1, 1.0, facts)


def test_a_lock_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(LOCK.to_toml())
    assert read_lock(path) == LOCK


def test_a_lock_is_put_together_from_the_layers() -> None:
    wheel = Package("attrs", "23.1.0", "attrs-23.1.0-py3-none-any.whl", "a" * 64)
    backend = Package("hatchling", "1.0", "hatchling-1.0-py3-none-any.whl", "b" * 64)
    records = [
        _record("base", "base", {}),
        _record("system", "system", {"versions": "gcc=4:12.2.0-3"}),
        _record("python", "python_copy", {}, version="3.11.7", build="x", abi="y"),
        _record("r", "requirements", {"lock": "attrs==23.1.0", "packages": packages_fact([wheel])}),
        _record(
            "i", "install", {"lock": "attrs==23.1.0\nDemo_Pkg==2\n-e /testbed", "packages": packages_fact([backend])}
        ),
    ]
    lock = lock_of("demo", records)
    assert lock.base == "base"
    assert lock.python == {"version": "3.11.7", "build": "x", "abi": "y", "kind": "copy"}
    assert lock.system == {"gcc": "4:12.2.0-3"}
    assert lock.installed == {"attrs": "23.1.0", "demo-pkg": "2"}
    assert lock.steps == {"requirements": (wheel,), "install": (backend,)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("format = 1", "format = 2"), "format 2"),
        (("a" * 64, "xyz"), "not a lock file"),
        (("attrs-23.1.0-py3", "../attrs-23.1.0-py3"), "not a lock file"),
        (("[python]", "[pyton]"), "not a lock file"),
        (('step = "requirements"', "step = 1"), "not a lock file"),
        (("[system]", "[system"), "not a lock file"),
    ],
)
def test_files_that_are_no_locks(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(LOCK.to_toml().replace(*change))
    with pytest.raises(InvalidValue, match=said):
        read_lock(path)


def test_a_lock_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no lock"):
        read_lock(tmp_path / "x.toml")


def test_pins_of_pip(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("six==1.16.0\n")
    (tmp_path / "pins.txt").write_text(
        "# made by pip-compile\n-r base.txt\n--index-url https://x.invalid\n"
        "attrs==23.1.0 \\\n    --hash=sha256:abc \\\n    --hash=sha256:def\n"
        "pywin32==306 ; sys_platform == 'win32'  # only there\n-e git+https://x.invalid/y#egg=y\n\nsix==1.16.0\n"
    )
    pins = read_pins(tmp_path / "pins.txt")
    assert pins.requirements == ("six==1.16.0", "attrs==23.1.0", "pywin32==306 ; sys_platform == 'win32'")
    assert [line for line, _ in pins.skipped] == ["--index-url https://x.invalid", "-e git+https://x.invalid/y#egg=y"]


def test_pins_of_conda(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text(
        "name: testbed\nchannels:\n  - defaults\ndependencies:\n  - openssl=3.0.15=h5eee18b_0\n"
        "  - pip=24.2=py311h06a4308_0\n"
        "  - python=3.11.10=he870216_0\n  - pip:\n      - alabaster==0.7.13\nprefix: /opt/miniconda3/envs/testbed\n"
    )
    pins = read_pins(tmp_path / "environment.yml")
    assert (pins.requirements, pins.python) == (("pip==24.2", "alabaster==0.7.13"), "3.11.10")
    assert [line for line, _ in pins.skipped] == ["openssl=3.0.15=h5eee18b_0"]


@pytest.mark.parametrize(
    "line", ["attrs @ file:///croot/attrs", "git+https://x.invalid/y", "./local", "attrs==", "a b"]
)
def test_pins_that_no_index_has(tmp_path: Path, line: str) -> None:
    (tmp_path / "pins.txt").write_text(line)
    with pytest.raises(InvalidValue) as caught:
        read_pins(tmp_path / "pins.txt")
    assert caught.value.hint


def test_pins_are_read_of_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"# " + b"x" * (16 << 20))
    (tmp_path / "nul").write_text("-r a\0b\n")
    for place in ("pipe", "large", "nul", ".", "gone", "/dev/zero"):
        with pytest.raises(InvalidValue, match="cannot read the pins in"):
            read_pins(tmp_path / place)


def test_pins_that_name_each_other_are_read_once(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"-r {(number + 1) % 30}.txt\n" * 2 + f"p{number}==1\n")
    assert len(read_pins(tmp_path / "0.txt").requirements) == 30
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    with pytest.raises(InvalidValue, match="more than 100 files"):
        read_pins(tmp_path / "0.txt")


@pytest.mark.parametrize("packages", ["[" * 100_000, "5", "[[1]]", "{"])
def test_a_layer_from_elsewhere_may_say_anything_of_its_packages(packages: str) -> None:
    record = LayerRecord("a" * 64, None, {"kind": "python_copy"}, 0, 0, 0, 0, {PACKAGES: packages})
    with pytest.raises(StoreError, match="does not say what was installed"):
        lock_of("one", [record])
