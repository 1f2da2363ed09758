"""Build the disks of the virtual machine: the root file system, a kernel's modules, and the checkout."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import inspect
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.kernels.debian import SUITE, Archive

PROJECT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PACKAGES = (
    "python3", "python3-venv", "git", "make", "uidmap", "procps", "iproute2", "kmod", "ca-certificates", "util-linux",
    "patch", "xz-utils",
)  # fmt: skip
TEST_TOOLS = ("pytest", "pytest-xdist", "pytest-rerunfailures", "hypothesis")
LOCKS = ("requirements.lock", "requirements-dev.lock")
USER = "tester"
_VENV = "opt/venv"
_SITE = f"{_VENV}/lib/python3.11/site-packages"
_CHECKOUT = "/opt/minisandbox"
_BUILDING = "building-"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_DRIVERS = ("virtio_pci", "virtio_blk", "ext4")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A bootable kernel.

    Attributes:
        package: the name of the Debian package.
        directory: the directory with ``vmlinuz``, ``initrd.gz`` and ``modules.ext4``.
    """

    package: str
    directory: Path


def remove_unfinished(cache: Path) -> None:
    """Remove the unfinished files of interrupted runs; the caller must hold the cache's lock."""
    for path in cache.glob(f"{_BUILDING}*"):
        shutil.rmtree(path)


@contextlib.contextmanager
def _building(cache: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=cache))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _make_disk(tree: Path, disk: Path, size: int) -> None:
    with disk.open("wb") as file:
        file.truncate(size)
    _run("mke2fs", "-q", "-t", "ext4", "-d", tree, disk)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def root_disk(cache: Path, archive: Archive) -> Path:
    """Return the disk with the root file system; rebuild it if its inputs have changed."""
    locks = [(PROJECT / name).read_text() for name in LOCKS]
    steps = [inspect.getsource(step) for step in (_install_debian, _install_python)]
    disk = cache / f"root-{_key(*PACKAGES, *TEST_TOOLS, *steps, *locks)}.ext4"
    if disk.exists():
        return disk
    print("making the root file system: three minutes", flush=True)
    with _building(cache) as work:
        root = work / "root"
        _install_debian(root, cache / "debs", archive)
        _install_python(root)
        _make_disk(root, work / "root.ext4", 4 << 30)
        for old in cache.glob("root-*.ext4"):
            old.unlink()
        (work / "root.ext4").rename(disk)
    return disk


def _install_debian(root: Path, downloads: Path, archive: Archive) -> None:
    """Install Debian in a mount namespace, because an interrupted debootstrap(8) leaves /proc mounted."""
    downloads.mkdir(exist_ok=True)
    command: list[str | Path] = [
        "unshare", "--mount", "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        f"--cache-dir={downloads}", SUITE, root, archive.address,
    ]  # fmt: skip
    with (downloads.parent / "debootstrap.log").open("wb") as log:
        subprocess.run(command, stdout=log, check=True)
    _run("chroot", root, "useradd", "--create-home", "--shell", "/bin/bash", USER)
    (root / _CHECKOUT[1:]).mkdir()
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")


def _install_python(root: Path) -> None:
    _run("chroot", root, "python3", "-m", "venv", "--without-pip", f"/{_VENV}")
    _run(
        Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--target", root / _SITE,
        "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36", "--only-binary", ":all:",
        "--requirement", PROJECT / LOCKS[0], "--constraint", PROJECT / LOCKS[1], *TEST_TOOLS,
    )  # fmt: skip
    (root / _SITE / "minisandbox.pth").write_text(f"{_CHECKOUT}/src\n")
    _run("chroot", root, "python3", "-m", "compileall", "-q", f"/{_SITE}")


def kernel(cache: Path, archive: Archive, series: str) -> Kernel:
    """Return the newest kernel of a series; download it if it is new."""
    package = archive.newest_kernel(series)
    key = _key(inspect.getsource(_make_initrd), (HERE / "initrd-init").read_text())
    cached = Kernel(package, cache / f"{package}-{key}")
    if cached.directory.exists():
        return cached
    print(f"downloading {package}", flush=True)
    with _building(cache) as work:
        tree, result = work / "tree", work / "kernel"
        result.mkdir()
        _run("dpkg-deb", "-x", archive.download(package, work), tree)
        (image,) = (tree / "boot").glob("vmlinuz-*")
        release = image.name.removeprefix("vmlinuz-")
        _run("depmod", "-b", tree, release)
        shutil.copy(image, result / "vmlinuz")
        _make_initrd(tree, release, work / "initrd", result / "initrd.gz")
        _make_disk(tree / "lib/modules", result / "modules.ext4", 256 << 20)
        for old in cache.glob(f"linux-image-{series}.*-cloud-amd64-*"):
            shutil.rmtree(old)
        result.rename(cached.directory)
    return cached


def _make_initrd(tree: Path, release: str, directory: Path, initrd: Path) -> None:
    """Write an initramfs with busybox, the disk drivers, and a script that mounts the disks."""
    for name in ("bin", "dev", "modules", "proc", "root", "sys"):
        (directory / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, directory / "bin/busybox")
    shutil.copy(HERE / "initrd-init", directory / "init")
    drivers = _drivers(tree, release)
    for path in drivers:
        shutil.copy(path, directory / "modules")
    (directory / "modules/order").write_text("".join(f"{path.name}\n" for path in drivers))
    names = "".join(f"{path.relative_to(directory)}\n" for path in sorted(directory.rglob("*")))
    pack = ["cpio", "--create", "--format=newc", "--quiet"]
    packed = subprocess.run(pack, cwd=directory, input=names.encode(), stdout=subprocess.PIPE, check=True)
    initrd.write_bytes(gzip.compress(packed.stdout, 1))


def _drivers(tree: Path, release: str) -> list[Path]:
    """Return the module files of the disk drivers in the order of loading, without built-in drivers."""
    modules: dict[Path, None] = {}
    for driver in _DRIVERS:
        show = ["modprobe", "-d", str(tree), "-S", release, "--show-depends", driver]
        rows = (line.split() for line in subprocess.check_output(show, text=True).splitlines())
        modules.update((Path(row[1]), None) for row in rows if row[0] == "insmod")
    return list(modules)


@contextlib.contextmanager
def checkout_disk(cache: Path, settings: Mapping[str, Sequence[str]]) -> Iterator[Path]:
    """Create a disk with the files of the working tree, except those that git ignores; remove it afterwards.

    Args:
        cache: the directory in which to create the disk.
        settings: arrays for the shell script ``guest-init``, by variable name.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(listed, cwd=PROJECT, text=True).split("\0")
    with _building(cache) as work:
        tree = work / "checkout"
        for name in names:
            if name and (PROJECT / name).is_file():  # git also lists deleted files
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROJECT / name, tree / name, follow_symlinks=False)
        text = "".join(f"{name}=({shlex.join(words)})\n" for name, words in settings.items())
        (tree / "settings.sh").write_text(text)
        if _CERTIFICATES.is_file():  # it may contain a company's own authority
            shutil.copy(_CERTIFICATES, tree)
        _make_disk(tree, work / "checkout.ext4", 256 << 20)
        yield work / "checkout.ext4"
