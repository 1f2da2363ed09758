"""Find and download packages of Debian 12 in the archive that this machine's apt is configured with."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SUITE = "bookworm"
_LISTS_LAST = 24 * 3600.0
"""Seconds until the package lists are fetched again to find newer kernels."""


class MissingError(Exception):
    """A requirement is missing on this machine; the message says how to install it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A Debian archive with package lists of its own, because this machine's lists may lack Debian 12.

    Attributes:
        address: the URL of the archive.
        directory: the directory of apt's lists and downloads.
    """

    address: str
    directory: Path

    @classmethod
    def find(cls, directory: Path) -> Archive:
        """Find the archive's address in apt's configuration, and write a list of sources to ``directory``.

        Raises:
            MissingError: apt's configuration has no Debian archive.
        """
        command = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Identifier: Packages"]
        rows = [row.split("|") for row in subprocess.check_output(command, text=True).splitlines()]
        addresses = {label: address for origin, label, address in reversed(rows) if origin == "Debian"}
        if "Debian" not in addresses:
            raise MissingError("apt knows no Debian archive: run apt-get update, or add one to /etc/apt/sources.list.d")
        (directory / "lists/partial").mkdir(parents=True, exist_ok=True)
        sources = [f"deb {addresses['Debian']} {suite} main" for suite in (SUITE, f"{SUITE}-backports")]
        if "Debian-Security" in addresses:
            sources.append(f"deb {addresses['Debian-Security']} {SUITE}-security main")
        (directory / "sources.list").write_text("\n".join([*sources, ""]))
        return cls(addresses["Debian"], directory)

    def update(self) -> None:
        """Fetch the package lists, at most once a day; if that fails, use the lists of an earlier run."""
        stamp = self.directory / "updated"
        text = (self.directory / "sources.list").read_text()
        is_fresh = stamp.exists() and time.time() - stamp.stat().st_mtime < _LISTS_LAST
        has_lists = stamp.exists() and stamp.read_text() == text
        if has_lists and is_fresh:
            return
        try:
            self._apt("apt-get", "-q", "update", "--error-on=any")
        except subprocess.CalledProcessError:
            if not has_lists:
                raise
            print("apt-get update failed; using the lists of an earlier run", flush=True)
        else:
            stamp.write_text(text)

    def newest_kernel(self, series: str) -> str:
        """Return the name of the newest cloud kernel package of a series.

        Args:
            series: the kernel version without its last number, for instance ``6.12``.

        Raises:
            MissingError: the archive has no such kernel.
        """
        pattern = re.compile(rf"linux-image-{re.escape(series)}\.\d+(\+deb12[.\d]*|-\d+)-cloud-amd64")
        names = self._apt("apt-cache", "pkgnames", f"linux-image-{series}.").split()
        packages = [name for name in names if pattern.fullmatch(name)]
        if not packages:
            raise MissingError(f"the archive has no cloud kernel {series} for {SUITE}; KERNELS takes 6.1 and 6.12")
        return max(packages, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def download(self, package: str, directory: Path) -> Path:
        """Download the newest version of a package to ``directory``; return the path of its file."""
        self._apt("apt-get", "-q", "download", package, cwd=directory)
        (file,) = directory.glob(f"{package}_*.deb")
        return file

    def _apt(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        settings = {
            "Dir::Etc::SourceList": self.directory / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": self.directory / "lists",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "APT::Sandbox::User": "root",  # apt's own user cannot write to the directory
            "APT::Architecture": "amd64",
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return subprocess.check_output([program, *options, *arguments], text=True, cwd=cwd)
