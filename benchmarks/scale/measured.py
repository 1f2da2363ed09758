"""What was measured on layers that the product built: used where nothing is measured anew (``--sample``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.scale.environments import ByteCode


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers from real layers.

    Attributes:
        bytecode: how large byte code is, by interpreter.
        prefixes: bytes on disk of an interpreter's layer, by interpreter.
        installed: bytes on disk that installing a project in place leaves for each commit of its own.
        built: the same of projects that have compiled modules.
        sources: bytes of sources, repositories and hidden tests of all tasks, by data set; used without mirrors.
    """

    bytecode: Mapping[str, ByteCode]
    prefixes: Mapping[str, int]
    installed: int
    built: Mapping[str, int]
    sources: Mapping[str, int]

    def bytecode_of(self, python: str) -> ByteCode:
        """The measured line, or that of the nearest interpreter that was measured."""
        return self.bytecode[_nearest(python, self.bytecode)]

    def prefix_of(self, python: str) -> int:
        """The measured bytes of an interpreter, or those of the nearest one that was measured."""
        return self.prefixes[_nearest(python, self.prefixes)]

    def built_of(self, repository: str) -> int:
        """What installing a repository leaves."""
        return self.built.get(repository, self.installed)


def _nearest(python: str, known: Mapping[str, object]) -> str:
    number = _number(python)
    return min(known, key=lambda one: (abs(_number(one) - number), one))


def _number(python: str) -> int:
    return int(python.partition(".")[2])


RECORDED = Measured(
    bytecode={
        "3.6": ByteCode(353, 0.740),
        "3.7": ByteCode(567, 0.692),
        "3.8": ByteCode(588, 0.690),
        "3.9": ByteCode(925, 0.730),
        "3.10": ByteCode(941, 0.704),
        "3.11": ByteCode(3788, 0.935),
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
    installed=100_000,
    built={"astropy/astropy": 30_000_000, "scikit-learn/scikit-learn": 60_000_000, "matplotlib/matplotlib": 30_000_000},
    sources={"swebench": 0, "swesmith": 0},
)
