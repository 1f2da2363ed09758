"""Fuzz one parser with Atheris: ``python -m tests.fuzz NAME DIRECTORY [libFuzzer option...]``.

Inputs that reach new code are written to DIRECTORY. A finding ends the run; its input is beside DIRECTORY, in
``NAME-crash-*``, ``NAME-timeout-*`` or ``NAME-oom-*``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore] # in an environment of its own

with atheris.instrument_imports(include=["minisandbox", "e2b_dockerfile_utils"]):
    from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
OPTIONS = ("-max_len=6144", "-timeout=30", "-rss_limit_mb=1536", "-print_final_stats=1")


def main(name: str, directory: Path, *options: str) -> None:
    """Fuzz a parser, starting from the seeds, the kept corpus and what DIRECTORY has."""
    target: Target = TARGETS[name]
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (directory / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        changed = target.mutate(
            lambda part: bytes(atheris.Mutate(part, max(most, len(part)))), data, random.Random(seed)
        )
        return changed[:most]

    paths = [str(path) for path in (directory, CORPUS / name) if path.is_dir()]
    artifacts = f"-artifact_prefix={directory.parent}/{name}-"
    atheris.Setup([sys.argv[0], *OPTIONS, artifacts, *options, *paths], target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
