"""Compute what the store takes for the paper's two whole data sets, from the exact pins of all their environments.

python -m benchmarks.paper_scale --pins DIR --rows FILE --mirrors DIR [--cache DIR] [--sample]

DIR has the exported environments: swebench/REPO/NUMBER/environment.yml and swesmith/REPO.COMMIT/*.yml. The package
index of this machine is asked once for the lists of files in all wheels (their central directories, by range requests);
the cache keeps the answers, and an interrupted run goes on from there. The rows are the tasks of SWE-bench, JSON lines;
the mirrors are git repositories with their commits, OWNER+NAME or OWNER__NAME: trees and the repositories inside images
are counted object by object. Without rows or mirrors, recorded sizes are used. `--sample` first builds environments
with the product, in a store in the cache: it measures interpreters and byte code, and checks the count against it.

Environments with PyTorch are counted twice: with the CUDA libraries that their pins name, and with builds for the CPU,
whose files are taken to be those of the other build without CUDA's.

Beside what plain layers take stands what they take frozen: the files of each layer for itself, by the measured ratio of
blobs to blocks of their kind (benchmarks/scale/cold.py), CUDA libraries by what their wheels take, lists of files as
they are. The original's numbers are of compressed archives; containers' are unpacked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale.index import Index
from benchmarks.scale.measured import RECORDED, Measured
from benchmarks.scale.pins import Environment, read_environments
from benchmarks.scale.sample import sample
from benchmarks.scale.survey import Part, Survey

from minisandbox.index_settings import host_settings


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set of the paper.

    Attributes:
        folder: where its pins lie.
        title: its name.
        tasks: how many it has.
        original: what the original takes, as its paper says, in bytes.
        containers: what containers take, as the paper says, in bytes.
        aim: what our store may take, in bytes.
    """

    folder: str
    title: str
    tasks: int
    original: float
    containers: float
    aim: float


VERIFIED = DataSet("swebench", "SWE-bench Verified", 500, 89e9, 605e9, 25e9)
SMITH = DataSet("swesmith", "SWE-smith", 50_137, 13.5e9, 295e9, 7e9)


def main() -> None:
    """Compute and print."""
    options = _options()
    index = Index(options.cache / "index", host_settings())
    environments = {each.folder: read_environments(options.pins / each.folder) for each in (VERIFIED, SMITH)}
    measured = RECORDED
    if options.sample:
        measured = sample(
            options.cache / "sample", [one for each in environments.values() for one in each], index, print
        )
    for each in (VERIFIED, SMITH):
        survey = Survey()
        survey.add_packages(environments[each.folder], index, measured, progress)
        _add_sources(survey, each, environments[each.folder], options, measured)
        progress("")
        report(each, survey)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pins", type=Path, required=True, help="the exported environments")
    parser.add_argument("--rows", type=Path, help="the tasks of SWE-bench")
    parser.add_argument("--mirrors", type=Path, help="git repositories")
    default = Path.home() / ".cache/minisandbox-paper-scale"
    parser.add_argument("--cache", type=Path, default=default, help=f"what the index said (default: {default})")
    parser.add_argument("--sample", action="store_true", help="build environments and measure them: half an hour")
    return parser.parse_args()


def _add_sources(
    survey: Survey, each: DataSet, environments: list[Environment], options: argparse.Namespace, measured: Measured
) -> None:
    trees = options.cache / "objects"
    if options.mirrors is None or (each is VERIFIED and options.rows is None):
        survey.add_recorded(measured.sources[each.folder])
    elif each is VERIFIED:
        survey.add_rows(options.rows, options.mirrors, trees, each.tasks, measured, progress)
    else:
        survey.add_repositories(environments, options.mirrors, trees, each.tasks, measured, progress)


def progress(text: str) -> None:
    """Show how far it is, on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)


def report(each: DataSet, survey: Survey) -> None:
    """Print what was found of a data set, beside the paper's numbers."""
    print(f"\n{each.title}\n{'=' * len(each.title)}")
    for note in survey.notes:
        print(f"- {note}")
    print(f"\n{'':<88} {'':>7} {'':>6} {'':>7}  with --torch-backend cpu")
    print(f"{'GB':<88} {'plain':>7} {'+-':>6} {'frozen':>7} {'plain':>7} {'frozen':>7}")
    for part in survey.parts:
        _line(part)
    _line(Part("all images", survey.total, "", survey.unsure, survey.cuda, survey.frozen, survey.frozen_cuda))
    for state, size, cuda in (
        ("plain", survey.total, survey.cuda),
        ("frozen", survey.frozen, survey.frozen_cuda),
    ):
        print(
            f"{state}: aim {each.aim / 1e9:g} GB: {_verdict(size, each)}, with --torch-backend cpu "
            f"{_verdict(size - cuda, each)}. The original {each.original / 1e9:g} GB, "
            f"ratio {size / each.original:.3f}; containers {each.containers / 1e9:g} GB, "
            f"ratio {size / each.containers:.4f}"
        )
    print("besides, where kept:")
    for part in survey.further:
        _line(part)
    print("would save:")
    for part in survey.savings:
        _line(part)


def _verdict(size: float, each: DataSet) -> str:
    return "reached" if size <= each.aim else "missed"


def _line(part: Part) -> None:
    if not part.bytes:
        return
    title = f"{part.title} ({part.how})" if part.how else part.title
    frozen = f" {part.frozen / 1e9:7.2f}" if part.frozen else ""
    lean = f" {(part.bytes - part.cuda) / 1e9:7.2f} {(part.frozen - part.frozen_cuda) / 1e9:7.2f}" if part.cuda else ""
    print(f"{title:<88} {part.bytes / 1e9:7.2f} {part.unsure / 1e9:6.2f}{frozen}{lean}")


if __name__ == "__main__":
    main()
