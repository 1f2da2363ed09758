"""Write ``docs/reference/api.md`` from the docstrings of the public names.

Public is what ``minisandbox`` exports, every class of ``minisandbox.errors``, and the fakes of
``minisandbox.sandbox.testing``. Sections of docstrings (Args, Returns, Raises, Attributes) become lists, and what they
name by ``:meth:`` and ``:class:`` becomes a link.

    python tools/make_reference.py           # write it
    python tools/make_reference.py --check   # only say whether it is as the docstrings have it
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import minisandbox
from minisandbox import errors
from minisandbox.sandbox import testing

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"
WIDTH = 100  # characters of a signature on one line
HOMES = {
    "sandbox": "Sandboxes",
    "types": "Values",
    "images": "Images",
    "store": "Images",
    "tasks": "Tasks",
    "grade": "Grading",
    "errors": "Errors",
}
FIRST = ("Sandbox", "Files", "Process", "Shell", "Snapshot")
HEAD = """# The Python API

This page is made from the docstrings by `make reference`; a test fails where it is not up to date. Every name can be
imported from `minisandbox`, errors from `minisandbox.errors`, fakes from `minisandbox.sandbox.testing`. Arguments after
`*` are given by name. Seconds are floats, sizes are bytes.
"""
TWINS = """Each has the names, arguments and results of its twin without `Async`; a test compares them. Methods are
coroutines, `events()` is an asynchronous iterator, and `async with` takes the place of `with`. Only what is particular
to them is listed.
"""
SAME = re.compile(r"As :\w+:`[^`]+`\.")
SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Yields):")
ROLE = re.compile(r":(?:meth|class|attr|func|mod|data):`[.~!]?([^`]+)`")
Member = Callable[..., object] | property | object


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it would change")
    text = page()
    if not parser.parse_args().check:
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(f"{OUTPUT.name} is not what the docstrings say: run 'make reference'", file=sys.stderr)
    return 1


# --- the page --------------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole page."""
    groups = public_names()
    known = {name for names in groups.values() for name in names}
    parts = [HEAD]
    for title, names in groups.items():
        parts.append(f"## {title}\n")
        if title == "Asynchronous twins":
            parts.append(TWINS)
        if title == "Fakes for tests":
            parts.append(prose(inspect.getdoc(testing) or "", known))
        parts += [chapter(name, value, known) for name, value in names.items()]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def public_names() -> dict[str, dict[str, object]]:
    """What is public, by the title of its part of the page."""
    groups: dict[str, dict[str, object]] = {"Sandboxes": {}, "Asynchronous twins": {}, "Fakes for tests": {}}
    names = [name for name in minisandbox.__all__ if not name.startswith("_")]
    for name in sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        if name != "MiniSandboxError":
            title = "Asynchronous twins" if name.startswith("Async") else HOMES[minisandbox._HOME[name]]
            groups.setdefault(title, {})[name] = getattr(minisandbox, name)
    groups["Fakes for tests"] = {name: getattr(testing, name) for name in ("FakeSandbox", "AsyncFakeSandbox")}
    groups["Errors"] = {kind.__name__: kind for kind in error_classes(errors.MiniSandboxError)}
    return groups


def error_classes(top: type[errors.MiniSandboxError]) -> Iterator[type[errors.MiniSandboxError]]:
    """The tree of errors, by exit status."""
    found = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, top)]
    yield from sorted(found, key=lambda kind: kind.exit_code)


def chapter(name: str, value: object, known: set[str]) -> str:
    """One public name."""
    if not inspect.isclass(value):
        assert isinstance(value, FunctionType)
        return f"### {name}\n\n{entry(name, value, known)}"
    parts = [f"### {name}\n", *class_facts(value), prose(class_doc(value), known)]
    for member_name, member in members(value):
        if not SAME.fullmatch(inspect.getdoc(member) or ""):
            parts.append(f"#### {name}.{member_name}\n")
            parts.append(entry(member_name, member, known))
    return "\n".join(parts)


def class_facts(value: type) -> Iterator[str]:
    """What a class is made like, or how it is called; its bases."""
    bases = [base.__name__ for base in value.__bases__ if base not in (object, enum.Enum)]
    if issubclass(value, errors.MiniSandboxError):
        yield f"Exit status {value.exit_code}." + (f" Also: {listing(bases)}." if bases != ["Exception"] else "") + "\n"
    elif issubclass(value, enum.Enum):
        yield "One of " + ", ".join(f"`{value.__name__}.{one.name}` (`{one.value!r}`)" for one in value) + ".\n"
    else:
        if has_constructor(value):
            yield code(f"{value.__name__}{arguments(value.__init__, skip=1)}")
        if bases:
            yield f"A kind of {listing(bases)}.\n"


def class_doc(value: type) -> str:
    """A class's docstring; without the arguments of a constructor that nobody calls."""
    doc = inspect.getdoc(value) or ""
    return doc if has_constructor(value) else re.sub(r"\n\nArgs:\n(    .*\n?)+", "", doc)


def has_constructor(value: type) -> bool:
    """Whether a class is meant to be called: a value, or one whose docstring has arguments."""
    doc = inspect.getdoc(value) or ""
    return hasattr(value, "__dataclass_fields__") or ("Args:" in doc and "core:" not in doc)


def listing(names: list[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)


def members(value: type) -> Iterator[tuple[str, Member]]:
    """The public members that a class defines and documents, in the order of its source."""
    for name, member in vars(value).items():
        if name.startswith("_") or (isinstance(value, enum.EnumMeta) and name in value.__members__):
            continue
        if isinstance(member, property | classmethod | staticmethod | FunctionType):
            yield name, member


def entry(name: str, member: Member, known: set[str]) -> str:
    """A function, method or property: how it is called, and what it does."""
    doc = prose(inspect.getdoc(member) or "", known)
    if isinstance(member, property):
        assert member.fget is not None
        return code(f"{name}: {annotation(member.fget.__annotations__['return'])}") + "\n" + doc
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    assert isinstance(function, FunctionType)
    word = "async " if inspect.iscoroutinefunction(function) else ""
    skip = 0 if isinstance(member, staticmethod) or "." not in function.__qualname__ else 1
    return code(f"{word}{name}{arguments(function, skip=skip)}") + "\n" + doc


# --- signatures ------------------------------------------------------------------------------------------------------


def code(text: str) -> str:
    """A block of code."""
    return f"```python\n{text}\n```\n"


def arguments(function: Callable[..., object], *, skip: int) -> str:
    """A signature as one reads it; on several lines where it is long."""
    signature = inspect.signature(function)
    words, starred = [], False
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
        starred = starred or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        words.append(argument(parameter))
    returned = signature.return_annotation
    tail = "" if returned in (inspect.Signature.empty, "None", None) else f" -> {annotation(returned)}"
    line = f"({', '.join(words)}){tail}"
    if len(line) <= WIDTH:
        return line
    return "(\n" + "".join(f"    {word},\n" for word in words) + f"){tail}"


def argument(parameter: inspect.Parameter) -> str:
    """One argument with its type and default."""
    stars = "*" * ((parameter.kind is parameter.VAR_POSITIONAL) + 2 * (parameter.kind is parameter.VAR_KEYWORD))
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {default(parameter.default)}"
    return text


def annotation(value: object) -> str:
    """A type as it is written in the source."""
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return text.replace("builtins.", "")


def default(value: object) -> str:
    """A default as one would write it."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    return "..." if " object at 0x" in text or text.startswith("<") else text


# --- docstrings ------------------------------------------------------------------------------------------------------


def prose(doc: str, known: set[str]) -> str:
    """A docstring as Markdown."""
    lines: list[str] = []
    section = ""
    for line in doc.splitlines():
        heading = SECTION.fullmatch(line)
        if heading:
            section = heading[1]
            lines += [f"**{section}**", ""]
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            lines.append(line)
        else:
            lines.append(item(line[4:], section, known))
    return marked("\n".join(lines).rstrip(), known) + "\n"


def item(line: str, section: str, known: set[str]) -> str:
    """A line of a section: the begin of an item, or its continuation."""
    if line.startswith("    "):
        return f"  {line.strip()}"
    name, colon, text = line.partition(":")
    if section in ("Returns", "Yields") or not colon:
        return line
    return f"- [`{name}`](#{name.lower()}):{text}" if section == "Raises" and name in known else f"- `{name}`:{text}"


def marked(text: str, known: set[str]) -> str:
    """Roles and literals of reStructuredText as Markdown."""

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("minisandbox.")
        top, _, member = name.partition(".")
        if top not in known:
            return f"`{name}`" if name[:1].isupper() or "." in name else f"`{name}()`"
        return f"[`{name}`](#{(top + member).lower()})"

    return re.sub(r"``([^`]+)``", r"`\1`", ROLE.sub(link, text))


if __name__ == "__main__":
    sys.exit(main())
