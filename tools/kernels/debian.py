"""The Debian archive that this machine's apt knows, seen from a Debian 12 machine: its kernels, and downloads."""

from __future__ import annotations

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SUITE = "bookworm"
_LISTS_LAST = 24 * 3600.0
"""Seconds after which apt looks for newer kernels again."""


class MissingError(Exception):
    """Something this machine lacks; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive, with lists of packages of our own: the machine's sources need not name this suite.

    Attributes:
        address: where the archive is.
        directory: holds apt's lists and what it downloads.
    """

    address: str
    directory: Path

    @classmethod
    def find(cls, directory: Path) -> Archive:
        """Find the archive's address in apt's configuration, and write the sources of the suite below ``directory``.

        Raises:
            MissingError: apt knows no archive of Debian.
        """
        shown = ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Identifier: Packages"]
        rows = [row.split("|") for row in subprocess.check_output(shown, text=True).splitlines()]
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
        """Fetch the lists of packages, at most once a day; where that fails, earlier ones will do."""
        stamp = self.directory / "updated"
        text = (self.directory / "sources.list").read_text()
        fresh = stamp.exists() and time.time() - stamp.stat().st_mtime < _LISTS_LAST
        known = stamp.exists() and stamp.read_text() == text
        if known and fresh:
            return
        try:
            self._apt("apt-get", "-q", "update", "--error-on=any")
        except subprocess.CalledProcessError:
            if not known:
                raise
            print("apt-get update failed; using the lists of an earlier run", flush=True)
        else:
            stamp.write_text(text)

    def newest_kernel(self, series: str) -> str:
        """Return the newest package of a cloud kernel.

        Args:
            series: its version without the last number, such as ``6.12``.

        Raises:
            MissingError: there is none.
        """
        pattern = re.compile(rf"linux-image-{re.escape(series)}\.\d+(\+deb12[.\d]*|-\d+)-cloud-amd64")
        names = self._apt("apt-cache", "pkgnames", f"linux-image-{series}.").split()
        found = [name for name in names if pattern.fullmatch(name)]
        if not found:
            raise MissingError(f"the archive has no cloud kernel {series} for {SUITE}; KERNELS takes 6.1 and 6.12")
        return max(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def download(self, package: str, directory: Path) -> Path:
        """Download the newest version of a package; returns its file in ``directory``."""
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
            "APT::Sandbox::User": "root",  # or apt warns that its own user cannot write here
            "APT::Architecture": "amd64",
        }
        options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return subprocess.check_output([program, *options, *arguments], text=True, cwd=cwd)
