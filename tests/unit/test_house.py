"""The rules of the house, checked on the sources themselves (ARCHITECTURE.md has the reasons)."""

from __future__ import annotations

import ast
import gc
import itertools
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "minisandbox"
# Runs inside sandboxes under whatever Python the task has; its rules are those of that Python.
FOREIGN = PACKAGE / "grade" / "inside"

LONGEST_FUNCTION = 100
LONGEST_FILE = 600

# Who may import whom. A name "x" allows the package; "x." allows only its public face, `from minisandbox.x import ...`.
BELOW_ROLLOUTS = (
    "spec.", "launch", "egress", "host", "store", "sandbox", "images", "runs", "tasks", "grade", "models", "agents",
    "trajectories",
)  # fmt: skip
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "patches": (),
    "compression": (),
    "syntax": (),
    "certificates": (),
    "git": ("host",),
    "reading": (),
    "lazy": (),
    "values": (),
    "index_settings": ("store",),
    "redaction": (),
    "wheels": (),
    "spec": (),
    "launch": (),
    "egress": ("launch",),
    "host": ("launch",),
    "store": ("launch", "host"),
    "sandbox": ("launch", "egress", "host", "store"),
    "images": ("spec.", "sandbox", "store", "host", "launch"),
    "testing": ("sandbox", "store", "host", "launch"),
    "runs": ("images.", "store"),
    "tasks": ("spec.",),
    "grade": ("spec.", "tasks", "images", "sandbox", "runs", "store"),
    "models": (),
    "agents": ("spec.", "models", "tasks", "sandbox."),
    "trajectories": ("tasks", "grade", "models", "agents"),
    "rollouts": BELOW_ROLLOUTS,
    "train": ("trajectories", "rollouts", "models", "tasks", "agents", "grade"),
    "view": ("trajectories", "rollouts", "models", "grade", "store", "sandbox."),
}
FREE = ("integrations", "cli", "__main__")
SHARED = (
    "errors", "types", "plugins", "patches", "compression", "syntax", "certificates", "index_settings", "redaction",
    "wheels", "git", "reading", "lazy", "values",
)  # fmt: skip
WITHOUT_THIRD_PARTY = ("launch", "egress", "host", "store", "sandbox")
# Loaded where something is compressed, and only then (docs/dependencies.md).
COMPRESSORS = {"compression": ("isal", "zstandard")}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target."""

    module: str  # absolute dotted name
    line: int
    at_module_level: bool
    for_typing: bool


def source_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(FOREIGN))


@cache
def parse(path: Path) -> ast.Module:
    gc.disable()  # it would walk all trees again and again: four fifths of the time
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.enable()


def house_of(path: Path) -> str:
    """The package of ours that a file belongs to; a top-level module is its own."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[Import]:
    inside = ("minisandbox", *path.relative_to(PACKAGE).parent.parts)

    def visit(node: ast.AST, top: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, top, typing)
            elif isinstance(child, ast.ImportFrom):
                for name in absolute_names(child, inside):
                    yield Import(name, child.lineno, top, typing)
            else:
                inner = top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from visit(child, inner, typing or guarded)

    yield from visit(parse(path), True, False)


def absolute_names(node: ast.ImportFrom, inside: tuple[str, ...]) -> Iterator[str]:
    base = inside[: len(inside) - node.level + 1] if node.level else ()
    module = ".".join((*base, *((node.module or "").split(".") if node.module else ())))
    if (
        module in ("minisandbox", "") or node.module is None
    ):  # `from minisandbox import x`, `from . import x`: x may be a module
        yield from (f"{module}.{alias.name}".strip(".") for alias in node.names)
    else:
        yield module


def test_every_package_has_rules() -> None:
    houses = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert houses <= {*MAY_IMPORT, *FREE}, "a package that the table of imports does not know"


def test_packages_import_only_what_they_may() -> None:
    offences = []
    for path in source_files():
        house = house_of(path)
        if house in FREE or path == PACKAGE / "__init__.py":  # the lazy table of public names is checked below
            continue
        for found in imports_of(path):
            parts = found.module.split(".")
            ours = parts[0] == "minisandbox" and len(parts) > 1 and parts[1] != "__version__"  # these load nothing
            if (not ours or parts[1] == house) and not (house == "launch" and found.module == "minisandbox"):
                continue
            allowed = MAY_IMPORT.get(house, ())
            target = parts[1] if len(parts) > 1 else ""
            fine = (
                target in allowed
                or (f"{target}." in allowed and len(parts) == 2)
                or (target in SHARED and house != "launch")
            )
            if not fine:
                offences.append(f"{path.relative_to(ROOT)}:{found.line}: {house} may not import {found.module}")
    assert not offences, "\n".join(offences)


def test_nothing_imports_the_outermost_packages() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{found.line}: imports {found.module}"
        for path in source_files()
        if house_of(path) not in FREE
        for found in imports_of(path)
        if found.module.startswith(tuple(f"minisandbox.{name}" for name in FREE))
    ]
    assert not offences, "\n".join(offences)


def test_the_package_itself_imports_nothing_of_ours_when_loaded() -> None:
    eager = [
        found.module
        for found in imports_of(PACKAGE / "__init__.py")
        if found.at_module_level and not found.for_typing and found.module not in sys.stdlib_module_names
    ]
    assert eager == []


def modules_by_name() -> dict[str, Path]:
    """Return all modules by dotted name below the package."""
    paths = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in source_files()}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in paths.items()}


def imported_modules(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules among these that a file imports anywhere: in functions and for type checkers too."""
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(parse(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            above = ("minisandbox", *package)[: len(package) + 2 - node.level] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            # `from package import name`: the name may be a module, and then the package itself matters little
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in prefixed(modules) else base for alias in node.names
            ]
        yield from (name.removeprefix("minisandbox.") for name in names if name in prefixed(modules))


def prefixed(modules: dict[str, Path]) -> set[str]:
    return {f"minisandbox.{name}" for name in modules}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.add(frozenset(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"f", "a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("de")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = modules_by_name()
    graph = {name: set(imported_modules(path, modules)) for name, path in modules.items()}
    assert "launch.jobs.job" in graph["launch.jobs.worker"]
    assert circles(graph) == set(), "modules that import each other, directly or not"


def core_requirements() -> set[str]:
    """Import names of what an installation without extras has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_").lower() for line in project["dependencies"]}


def third_party(path: Path) -> Iterator[Import]:
    for found in imports_of(path):
        top = found.module.split(".")[0]
        if top not in sys.stdlib_module_names and top != "minisandbox":
            yield found


def test_the_core_uses_the_standard_library_alone() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.module}"
        for path in source_files()
        if house_of(path) in (*WITHOUT_THIRD_PARTY, *(f"{name}" for name in SHARED))
        for found in third_party(path)
        if found.at_module_level or found.module.partition(".")[0] not in COMPRESSORS.get(house_of(path), ())
    ]
    assert not offences, "\n".join(offences)


# Functions import these, where the extra is installed.
WHOLLY_OPTIONAL = (
    "models/engine/decoding.py", "train/losses.py", "train/learner.py", "train/policy.py",
    "view/charts.py", "view/export.py", "view/pages.py", "view/server.py",
)  # fmt: skip


def test_optional_packages_are_imported_inside_functions() -> None:
    core = core_requirements()
    offences = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.module}"
        for path in source_files()
        if house_of(path) != "integrations"  # their classes have somebody else's for bases
        and not path.as_posix().endswith(WHOLLY_OPTIONAL)
        for found in third_party(path)
        if found.module.split(".")[0].lower() not in core and found.at_module_level and not found.for_typing
    ]
    assert not offences, "\n".join(offences)


def test_integrations_are_imported_inside_functions() -> None:
    """They import what they integrate: only whoever asks for one may meet that."""
    offences = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.module}"
        for path in source_files()
        if house_of(path) != "integrations"
        for found in imports_of(path)
        if found.module.startswith("minisandbox.integrations") and found.at_module_level and not found.for_typing
    ]
    assert not offences, "\n".join(offences)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def python_files() -> list[Path]:
    tops = ("src", "tests", "benchmarks", "tools", "examples")
    return sorted(itertools.chain.from_iterable((ROOT / top).rglob("*.py") for top in tops))


def test_functions_and_files_stay_short() -> None:
    offences = []
    for path in python_files():
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > LONGEST_FILE:
            offences.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {LONGEST_FILE}")
        for node in functions(parse(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines")
    assert not offences, "\n".join(offences)


Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(tree: ast.Module | ast.ClassDef) -> Iterator[Documented]:
    for node in tree.body:
        if isinstance(node, ast.If):  # definitions that depend on the version
            yield from public_definitions(ast.Module(node.body, []))
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node)


def test_public_names_are_documented() -> None:
    offences = []
    for path in source_files():
        tree = parse(path)
        text = ast.get_docstring(tree)
        if not text or len(text) < 3:
            offences.append(f"{path.relative_to(ROOT)}: the module has no docstring")
        offences += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has no docstring"
            for node in public_definitions(tree)
            if not ast.get_docstring(node) and not is_overload(node)
        ]
    assert not offences, "\n".join(offences)


def is_overload(node: Documented) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in node.decorator_list)


def test_public_signatures_do_not_say_any() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in source_files()
        for node in public_definitions(parse(path))
        if not isinstance(node, ast.ClassDef)
        for annotation in annotations_of(node)
        if any(isinstance(part, ast.Name) and part.id == "Any" for part in ast.walk(annotation))
    ]
    assert not offences, "\n".join(offences)


def annotations_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    yield from (one.annotation for one in every if one is not None and one.annotation is not None)
    if node.returns is not None:
        yield node.returns


def test_dataclasses_are_slotted() -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in source_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if "dataclass" in ast.unparse(decorator) and "slots=True" not in ast.unparse(decorator)
    ]
    assert not offences, "\n".join(offences)


EXCEPTION_TO_A_RULE = re.compile(r"#\s*(?:noqa|type:\s*ignore)(?P<rest>.*)")


def test_exceptions_to_the_rules_carry_their_reason() -> None:
    offences = []
    for path in source_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            exempt = EXCEPTION_TO_A_RULE.search(line)
            if exempt and not re.search(r"( - |# )\w", exempt["rest"]):
                offences.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not offences, "say why:\n" + "\n".join(offences)


def test_commands_print_by_one_function_which_cleans() -> None:
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        if path.name != "output.py":
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            named = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
            assert named == [], f"{path.name}: use output.put()"


def test_broad_catches_carry_their_reason() -> None:
    offences = []
    for path in source_files():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
            if broad and "#" not in lines[node.lineno - 1]:
                offences.append(f"{path.relative_to(ROOT)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
    assert not offences, "say why on the line:\n" + "\n".join(offences)


def repository_texts() -> Iterator[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: what belongs to the repository is unknown")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                yield path, data.decode("utf-8", "replace")


def words_of_this_machine() -> set[str]:
    """What must not be written down anywhere: where this checkout and its environment lie, whose index it uses."""
    common = {Path("/"), Path("/tmp"), Path("/home"), Path("/root"), Path("/usr"), Path(tempfile.gettempdir())}
    neighbours = set(ROOT.parent.iterdir()) if ROOT.parent not in common else set()
    places = ({ROOT, Path(sys.prefix), Path.home()} | neighbours) - common
    words = {str(place) for place in places if not place.is_relative_to("/usr")}
    for name, value in os.environ.items():
        if re.fullmatch(r"(PIP|UV)_.*(INDEX|LINKS).*", name):
            words.update(word for word in value.split() if "/" in word)
    # In pieces, because this file is searched too.
    words.update(".".join(name) for name in (("pypi", "org"), ("pythonhosted", "org"), ("conda", "anaconda", "org")))
    return {word.rstrip("/") for word in words}


def test_nothing_names_a_machine_or_a_registry() -> None:
    words = words_of_this_machine()
    private = re.compile(
        "|".join(
            [
                r"/home/\w+/",
                "/root/" + r"\.(pyenv|cargo|rustup|conda|venv)",
                "/Users/" + r"\w",
                *(re.escape(w) + r"\b" for w in words),
            ]
        )
    )
    offences = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path, text in repository_texts()
        for number, line in enumerate(text.splitlines(), 1)
        if (match := private.search(line))
    ]
    assert not offences, "\n".join(offences)
