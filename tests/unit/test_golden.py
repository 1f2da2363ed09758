"""What users and their stores rely on, compared with golden data: layer keys, public names, options of commands."""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import json
import os
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest
from tests.foreign.dockerfiles import cases, lay_out
from tests.golden import GOLDEN, check_golden
from tests.unit.store_tools import key_of

import minisandbox
from minisandbox.cli.main import parser
from minisandbox.images import BuildOptions, Image
from minisandbox.images.base import BaseEntry
from minisandbox.images.dockerfile.reading import evaluated
from minisandbox.images.plan import ImagePlan, Planner
from minisandbox.images.python.interpreters import Interpreter
from minisandbox.spec import Buildable, GitSource, Lock, OciBase, Package, PythonRecipe, Recipe, ScratchBase, Source
from minisandbox.store import Made, Store
from minisandbox.tasks import read_recipe, task_from_row

# --- layer keys ------------------------------------------------------------------------------------------------------


SUBMODULES = GitSource("https://github.com/o/submodules", "0" * 40)
LOCK = Lock(
    "x", "b" * 64, {"version": "3.11.1"}, {}, {"attrs": "23.1.0"},
    {"requirements": (Package("attrs", "23.1.0", "attrs-23.1.0-py3-none-any.whl", "a" * 64),)},
)  # fmt: skip


PINS = "dependencies:\n  - pip=21.2.2=py36h06a4308_0\n  - python=3.6.13=h12debd9_1\n  - pip:\n      - pytz==2024.2\n"


class FixedPlanner(Planner):
    """A planner for a machine that is always the same: no key depends on the one that runs the test."""

    def base(self) -> tuple[BaseEntry, ...]:
        return (BaseEntry("etc", 0o40755),)

    def platform(self) -> str:
        return "f" * 64

    def interpreter(self, text: str) -> Interpreter:
        exact = re.sub(r"[^\d.].*", "", text.lstrip(">="))
        version = exact if exact.count(".") == 2 else f"{exact}.1"
        prefix = Path("/usr" if version == "3.13.1" else f"/opt/python{version}")
        return Interpreter(prefix / "bin/python", version, prefix, "abi", f"{version} (build)", "1 2")

    def container(self, base: OciBase) -> Image:
        layer, notes = key_of(base.reference), {"reference": base.reference, "platform": base.platform}
        environment = (("LANG", "C"), ("PATH", "/usr/bin:/bin"))
        return Image(
            base.reference, layer, (layer,), environment, PurePosixPath("/srv"), None, "", 0.0, notes, self.store,
            own_root=True, config={"Cmd": ["bash"]},
        )  # fmt: skip

    def described(self, source: Source, key: str) -> str:
        return "v1.0-3-gabc"


@pytest.fixture
def planner(tmp_path: Path) -> FixedPlanner:
    """A planner over a store that has the empty root, and a source of a version that left submodules empty."""
    planner = FixedPlanner(Store.open(tmp_path / "store"))
    planner.plan("image", Recipe(ScratchBase()))
    source = planner.plan("image", PythonRecipe(source=SUBMODULES)).steps[0]

    def make(work: Path) -> Made:
        (work / "tree").mkdir()
        return Made(work / "tree", {"submodules": "lib"})

    planner.store.ensure_layer(source.key, parent=None, step=source.definition, make=make)
    return planner


def recipes(place: Path) -> Iterator[tuple[str, Buildable]]:
    """Read dataset rows and recipe files."""
    dockerfile, _ = lay_out(cases(["copy-name"])[0], place)
    dockerfile.write_text("FROM base AS test\nARG V\nRUN echo $V\nFROM base\nCOPY a.txt /\n")
    for line in (GOLDEN / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield f"row: {row['name']}", task_from_row(row["row"], base=place, **row.get("options", {})).recipe()
    for row in benchmark_rows():
        repository, _, number = str(row["instance_id"]).rpartition("-")
        pins = place / "pins" / repository / number / "environment.yml"
        pins.parent.mkdir(parents=True)
        pins.write_text(PINS)
        for environment in ("pins", "image"):
            task = task_from_row(row, pins=place / "pins", environment=environment)
            yield f"{row['instance_id']} by its {environment}", task.recipe()
    for path in sorted((GOLDEN / "recipes").glob("*.toml")):
        yield f"recipe: {path.stem}", read_recipe(path)
    yield "lock", PythonRecipe("3.11", ("attrs",), lock=LOCK)
    yield "submodules left empty", PythonRecipe(source=SUBMODULES)


def dockerfiles(planner: FixedPlanner, place: Path) -> Iterator[tuple[str, Buildable]]:
    """Read the Dockerfiles of the conformance list."""
    for case in cases():
        dockerfile, context = lay_out(case, place / case.name)
        for path in context.glob("archive.*"):  # compressed by this machine's libraries
            path.unlink()
        if "archive" not in case.text:
            secrets = {name: value.encode() for name, value in case.pairs("secret").items()}
            options = BuildOptions(case.one("target") or None, case.pairs("arg"), "linux/amd64", secrets=secrets)
            yield f"Dockerfile: {case.name}", evaluated(dockerfile, context, options, planner.container)


def benchmark_rows() -> Iterator[dict[str, object]]:
    """Rows of SWE-bench and SWE-smith."""
    for name in ("swebench_rows", "swesmith_rows"):
        yield from map(json.loads, (GOLDEN.parent / "data" / f"{name}.jsonl").read_text("utf-8").splitlines())


def shown(name: str, plan: ImagePlan) -> str:
    base = " ".join(key[:12] for key in plan.base.layers)
    steps = [f"  {step.key[:12]} {step.name}" for step in (*plan.steps, *plan.side_steps)]
    return "\n".join([name, f"  {base} base", *steps, f"  {plan.content[:12]} content"])


@pytest.mark.once  # the process of the benchmarks' packages takes seconds of CPU
def test_keys_of_layers(planner: FixedPlanner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = list(recipes(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)  # an ordinary user's files have one owner, and so other keys
    named += dockerfiles(planner, tmp_path)
    texts = [shown(name, planner.plan("image", recipe)) for name, recipe in named]
    check_golden("layer_keys.txt", "\n".join(texts) + "\n")


# --- public names ----------------------------------------------------------------------------------------------------


def faces() -> Iterator[ModuleType]:
    """What users import from: the package, its packages, and modules of values and errors."""
    yield minisandbox
    for info in pkgutil.iter_modules(minisandbox.__path__):
        if info.name in ("errors", "testing", "types") or (info.ispkg and info.name not in ("cli", "integrations")):
            yield importlib.import_module(f"minisandbox.{info.name}")


def public(module: ModuleType) -> dict[str, object]:
    """The names that a module exports."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    names = sorted(name for name in getattr(module, "__all__", own) if not name.startswith("_"))
    return {name: getattr(module, name) for name in names}


def describe(name: str, value: object, exported: set[type]) -> Iterator[str]:
    """Describe a public name: its signature; of a class, also what it does not inherit from an exported class."""
    if not isinstance(value, type):
        yield f"{name}{signature(value)}" if inspect.isroutine(value) else f"{name}: {type(value).__name__}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(value, enum.Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in value)
    elif "__init__" in vars(value) and not getattr(value, "_is_protocol", False):
        yield f"    __init__{signature(value.__init__)}"
    for attribute, item in sorted(inspect.getmembers_static(value)):
        home = next(base for base in (*value.__mro__, object) if attribute in vars(base) or base is object)
        inherited = home is not value and home in exported
        if attribute.startswith("_") or inherited or not home.__module__.startswith("minisandbox"):
            continue
        if isinstance(item, property):
            yield f"    {attribute}: {inspect.get_annotations(item.fget).get('return') if item.fget else ''}"
        elif isinstance(item, staticmethod | classmethod) or inspect.isroutine(item):
            yield f"    {attribute}{signature(getattr(value, attribute))}"


def signature(value: object) -> str:
    """The signature as text, without the quotes of annotations; a default that is no short literal is ``...``."""
    whole = inspect.signature(value)  # type: ignore[arg-type]
    simple = (type(None), bool, int, float, str, tuple, PurePosixPath)
    parameters = [
        item if item.default is item.empty or isinstance(item.default, simple) else item.replace(default=...)
        for item in whole.parameters.values()
    ]
    text = str(whole.replace(parameters=parameters, return_annotation=whole.empty))
    unquoted = re.sub(r"(: )'([^']*)'", r"\1\2", text).replace("= Ellipsis", "= ...")
    return unquoted if whole.return_annotation is whole.empty else f"{unquoted} -> {whole.return_annotation}"


def test_public_names_and_signatures() -> None:
    modules = list(faces())
    exported = {value for module in modules for value in public(module).values() if isinstance(value, type)}
    lines = []
    for module in modules:
        lines.append(f"## {module.__name__}")
        for name, value in public(module).items():
            lines += [name] if module is minisandbox else describe(name, value, exported)
    check_golden("api.txt", "\n".join(lines) + "\n")


PACKAGES = ("sandbox", "images", "store", "tasks", "grade", "models", "agents", "trajectories", "rollouts", "runs")
"""What users may import from; the other packages are internal."""
HEAD = """\
# Packages

Import these names from their packages, as in `from minisandbox.agents import Session`. Other packages, modules and
attributes are internal. `minisandbox.types` has the value classes, `minisandbox.errors` the [exceptions](errors.md),
`minisandbox.testing` the [fakes](testing.md).
"""


def test_reference_lists_what_users_may_import() -> None:
    sections = [HEAD]
    for name in PACKAGES:
        module = importlib.import_module(f"minisandbox.{name}")
        names = textwrap.fill(", ".join(f"`{item}`" for item in public(module)), 118, break_on_hyphens=False)
        sections.append(f"## minisandbox.{name}\n\n{names}\n")
    check_golden("packages.md", "\n".join(sections), GOLDEN.parents[1] / "docs/reference/api")


# --- commands --------------------------------------------------------------------------------------------------------


def commands(*words: str) -> Iterator[str]:
    """Describe a command and its subcommands in lines that no version of argparse and no terminal wraps."""
    command = parser(words)
    for word in words:
        command = next(iter(subcommands(command))).choices[word]
    yield f"## {' '.join(('minisandbox', *words))}"
    yield command.description or ""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (f"  {choice.dest}: {choice.help}" for choice in action._choices_actions)
        elif "--help" not in action.option_strings:
            names = ", ".join(action.option_strings) or action.dest
            value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else "")
            many = "" if action.nargs in (None, 0) else f" ({action.nargs})"
            text = command._get_formatter()._expand_help(action) if action.help else ""
            yield f"  {names} {value}{many}{' required' if action.required else ''}: {' '.join(text.split())}"
    yield command.epilog or ""
    for action in subcommands(command):
        for name in action.choices:
            yield from commands(*words, name)


def subcommands(command: argparse.ArgumentParser) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]


def test_options_of_every_command() -> None:
    check_golden("commands.txt", "".join(f"{line.rstrip()}\n" for line in commands() if line.strip()))
