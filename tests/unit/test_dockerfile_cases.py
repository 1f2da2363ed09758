"""The Dockerfiles of the conformance list: each is read here without an engine, a base image or a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.foreign.dockerfiles import DATA, Case, cases, lay_out

from minisandbox.images.dockerfile.evaluation import BuildOptions, evaluate
from minisandbox.images.dockerfile.parsing import FLAGS, parse_dockerfile
from minisandbox.images.dockerfile.sources import content_digest, list_sources
from minisandbox.images.dockerfile.trees import open_context
from minisandbox.spec import Context, CopyFiles, Recipe, StageBase

CASES = cases()


def stages(recipe: Recipe) -> list[Recipe]:
    """A recipe and the recipes that it needs."""
    below = stages(recipe.base.recipe) if isinstance(recipe.base, StageBase) else []
    origins = [step.origin for step in recipe.steps if isinstance(step, CopyFiles)]
    others = [stage for origin in origins if isinstance(origin, StageBase) for stage in stages(origin.recipe)]
    return [*below, *others, recipe]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_case_comes_to_steps(case: Case, tmp_path: Path) -> None:
    dockerfile, context = lay_out(case, tmp_path)
    wanted = BuildOptions(
        target=case.one("target") or None, arguments=case.pairs("arg"),
        secrets={name: value.encode() for name, value in case.pairs("secret").items()},
    )  # fmt: skip
    files = Context(context, dockerfile)
    recipe = evaluate(parse_dockerfile(case.text), wanted, lambda _: {"Env": ["PATH=/bin"], "Cmd": ["bash"]}, files)
    tree = open_context(context, dockerfile)
    for stage in stages(recipe):
        for step in stage.steps:
            if isinstance(step, CopyFiles) and isinstance(step.origin, Context) and step.sources:
                found = list_sources(step, tree)
                assert found
                assert len(content_digest(found, tree)) == 64
    assert isinstance(recipe.config["Env"], list)


def test_the_list_has_every_instruction_and_flag() -> None:
    seen: set[str] = set()
    for case in CASES:
        for one in parse_dockerfile(case.text).instructions:
            seen |= {one.name, *(f"{one.name} --{name}" for name, _ in one.flags)}
    names = (
        "FROM RUN CMD LABEL MAINTAINER EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD STOPSIGNAL "
        "HEALTHCHECK SHELL"
    )
    flags = {f"{name} --{flag}" for name, found in FLAGS.items() for flag in found}
    refused = {"RUN --security", "ADD --keep-git-dir", "ADD --checksum"}
    assert not set(names.split()) - seen
    assert flags - seen <= refused
    assert len(CASES) >= 60
    assert len(list((DATA / "cases").glob("task-*.Dockerfile"))) >= 18
