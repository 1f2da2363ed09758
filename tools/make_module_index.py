"""Write ``docs/design/modules.md``, which lists every module with the first line of its docstring.

python tools/make_module_index.py           # write it
python tools/make_module_index.py --check   # only check that it is up to date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "minisandbox"
OUTPUT = ROOT / "docs" / "design" / "modules.md"
HEAD = """# Every module, in one line each

Search this page for the thing that you want to change. The lines are the first lines of the modules' docstrings.
`python tools/make_module_index.py` writes the page, and a test fails if it is out of date.
[ARCHITECTURE](../../ARCHITECTURE.md) explains the packages.
"""
ROLE = re.compile(r":\w+:`[.~!]?([^`]+)`")


def main() -> int:
    """Write the page, or check it; return 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it would change")
    text = page(PACKAGE)
    if not parser.parse_args().check:
        OUTPUT.write_text(text, encoding="utf-8")
        return 0
    if OUTPUT.is_file() and OUTPUT.read_text(encoding="utf-8") == text:
        return 0
    print(
        f"{OUTPUT.name} differs from the modules' docstrings: run 'python tools/make_module_index.py'", file=sys.stderr
    )
    return 1


def page(package: Path) -> str:
    """Return the content of the page."""
    return "\n".join([HEAD, *(chapter(folder, package) for folder in folders(package))])


def folders(package: Path) -> Iterator[Path]:
    """Yield the package, then its subpackages in the order of their paths."""
    yield package
    yield from sorted({path.parent for path in package.rglob("*.py")} - {package})


def chapter(folder: Path, package: Path) -> str:
    """Return the section of the page for one folder."""
    init = folder / "__init__.py"
    lines = [f"## {folder.relative_to(package.parent)}", ""]
    if init.is_file():
        lines += [first_line(init), ""]
    modules = sorted(path for path in folder.glob("*.py") if path != init)
    lines += [f"- `{path.name}`: {first_line(path)}" for path in modules]
    return "\n".join(lines).rstrip() + "\n"


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, as markdown."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"), str(path))) or ""
    line = ROLE.sub(r"``\1``", text.partition("\n")[0])
    return re.sub(r"``(.+?)``", r"`\1`", line)


if __name__ == "__main__":
    sys.exit(main())
