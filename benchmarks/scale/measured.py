"""What was measured on layers that the product built: used where nothing is measured anew (``--sample``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.scale.environments import BYTECODE, ByteCode


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers from real layers.

    Attributes:
        bytecode: how large byte code is, by interpreter.
        prefixes: bytes on disk of an interpreter's layer, by interpreter.
        installed: bytes on disk of metadata and directories that installing a project in place leaves, for each
            commit; "" for those that are not named.
        built: bytes of what compilers leave for each commit; two builds of astropy had little of it in common,
            though most of its sources are equal.
        sources: bytes of sources, repositories and hidden tests of all tasks, by data set; used without mirrors.
        blobs: what blobs take of the blocks of files, by the kind of step that made their layer, :data:`BYTECODE` apart
            (``python -m benchmarks.scale.cold``).
    """

    bytecode: Mapping[str, ByteCode]
    prefixes: Mapping[str, int]
    installed: Mapping[str, int]
    built: Mapping[str, int]
    sources: Mapping[str, int]
    blobs: Mapping[str, float]

    def bytecode_of(self, python: str) -> ByteCode:
        """The measured line, or that of the nearest interpreter that was measured."""
        return self.bytecode[_nearest(python, self.bytecode)]

    def prefix_of(self, python: str) -> int:
        """The measured bytes of an interpreter, or those of the nearest one that was measured."""
        return self.prefixes[_nearest(python, self.prefixes)]

    def installed_of(self, repository: str) -> int:
        """Metadata and directories that installing a repository leaves."""
        return self.installed.get(repository, self.installed[""])

    def built_of(self, repository: str) -> int:
        """What compiling a repository leaves."""
        return self.built.get(repository, 0)


def _nearest(python: str, known: Mapping[str, object]) -> str:
    number = _number(python)
    return min(known, key=lambda one: (abs(_number(one) - number), one))


def _number(python: str) -> int:
    return int(python.partition(".")[2])


RECORDED = Measured(
    bytecode={
        "3.6": ByteCode(352, 0.740),
        "3.7": ByteCode(567, 0.692),
        "3.8": ByteCode(751, 0.740),
        "3.9": ByteCode(1003, 0.727),
        "3.10": ByteCode(1150, 0.714),
        "3.11": ByteCode(1814, 1.179),
        "3.12": ByteCode(3439, 0.849),
    },
    prefixes={
        "3.6": 58_839_040,
        "3.7": 67_350_528,
        "3.8": 74_657_792,
        "3.9": 74_993_664,
        "3.10": 81_055_744,
        "3.11": 98_840_576,
        "3.12": 98_123_776,
    },
    # astropy's compiled files are measured: what its second commit did not share with the first. Of scikit-learn 105 MB
    # of generated C were seen for 1.3, its modules are as large as in its wheels; matplotlib's too, with a
    # guess for what building FreeType leaves. For these two nothing is taken to be shared.
    installed={"": 130_000, "django/django": 560_000, "sphinx-doc/sphinx": 2_900_000, "astropy/astropy": 310_000},
    built={"astropy/astropy": 19_000_000, "scikit-learn/scikit-learn": 90_000_000, "matplotlib/matplotlib": 50_000_000},
    sources={"swebench": 13_330_000_000, "swesmith": 2_470_000_000},
    # 120 MB of each kind (or all there is) of 60 images of SWE-bench and SWE-smith, 2026-11-21, in zstd streams of
    # 32 MiB, level 9; source trees of sympy, sphinx and astropy as blobs of layers: 0.161 to 0.169.
    #                  files   MB on disk   MB compressed
    # git               9766        161.6          27.1
    # install          10776        154.9          29.5
    # python_copy       5041        138.3          43.0
    # repository       18182         97.4          38.3
    # requirements      8354        195.4          46.4   byte code 2642, 46.7, 11.6; the rest 5712, 148.7, 35.4
    # task              2760        135.0         111.0
    # tests               79          1.7           0.2
    blobs={
        "git": 0.168,
        "install": 0.191,
        "python_copy": 0.311,
        "repository": 0.393,
        "requirements": 0.238,
        BYTECODE: 0.247,
        "task": 0.822,
        "tests": 0.133,
    },
)
