"""Analyse how a test uses values: which ones it compares results with, and what its variables contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from minisandbox.grade.confirm.edits import Function, assigned_values

EQUALITIES = frozenset({"assertEqual", "assertEquals", "assert_equal", "eq_"})
RAISES = re.compile(r"(pytest\.)?(raises|warns|deprecated_call)|(.*\.)?assert(Raises|Warns)\w*|(.*\.)?assert_raises\w*")
ASSERTS = re.compile(r"assert([A-Z_]\w*)?|eq_|ok_|\w*(fnmatch|re_match)_lines?\w*")
_TRANSPARENT = frozenset(
    {"list", "set", "tuple", "sorted", "dict", "frozenset", "len", "str", "repr", "approx", "abs", "fabs", "round"}
)
"""Functions whose first argument counts as the expected value if a result is compared with what they return."""
_CONSTRUCTORS = frozenset(
    {"Decimal", "Fraction", "datetime", "date", "time", "timedelta", "UUID", "Path", "PurePath", "PurePosixPath"}
)
"""Classes whose constructor arguments count as expected values."""


def names_in(expression: ast.expr) -> set[str]:
    """Return the names in an expression."""
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def reached(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the assertions and calls in a test, except those inside functions that it defines."""
    for statement in body:
        nodes: list[ast.AST] = [statement]
        while nodes:
            node = nodes.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                continue
            if isinstance(node, ast.Assert | ast.Call):
                yield node
            if not isinstance(node, ast.Assert):
                nodes.extend(ast.iter_child_nodes(node))


def equated(function: Function) -> Iterator[ast.expr]:
    """Yield the expected sides of the equality assertions in a test."""
    for node in reached(function.body):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
            yield node.test.comparators[0]
        elif (
            isinstance(node, ast.Call)
            and len(node.args) > 1
            and ast.unparse(node.func).rpartition(".")[2] in EQUALITIES
        ):
            yield node.args[1]


def leaves_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the variables and literals in an expected value, also inside containers and transparent calls."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in _TRANSPARENT and node.args:
            yield from leaves_of(node.args[0])
        elif name in _CONSTRUCTORS:
            yield from (argument for argument in node.args if isinstance(argument, ast.Constant))
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        for element in node.elts:
            yield from leaves_of(element)
    elif isinstance(node, ast.Dict):
        for value in node.values:
            yield from leaves_of(value)
    elif isinstance(node, ast.BinOp):
        yield from leaves_of(node.left)
        yield from leaves_of(node.right)
    else:
        yield node


def expected_arguments(call: ast.Call, helper: Function) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the arguments that the called function only compares with, and whether only for equality."""
    parameters = [argument.arg for argument in helper.args.posonlyargs + helper.args.args]
    if isinstance(call.func, ast.Attribute) and parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    named_arguments = list(zip(parameters, call.args, strict=False))
    named_arguments += [(word.arg, word.value) for word in call.keywords if word.arg]
    for name, argument in named_arguments:
        if is_only_expected(helper, name):
            yield argument, is_only_expected(helper, name, for_equality=True)


def is_only_expected(function: Function, name: str, *, for_equality: bool = False) -> bool:
    """Return whether a function uses a variable (or ``self.x``) only as an expected value in comparisons.

    Args:
        function: a test or a helper of tests.
        name: the name of the variable.
        for_equality: whether every comparison must be for equality.
    """
    attribute = name.rpartition(".")[2]
    uses = [node for node in ast.walk(function) if attribute in (getattr(node, "id", ""), getattr(node, "attr", ""))]
    loads = {
        id(node) for node in uses if isinstance(getattr(node, "ctx", None), ast.Load) and ast.unparse(node) == name
    }
    if not loads:
        return False
    expected_ids: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators] if not for_equality or isinstance(node.ops[0], ast.Eq) else []
        elif for_equality and isinstance(node, ast.Call):
            sides = node.args if ast.unparse(node.func).rpartition(".")[2] in EQUALITIES else []
        elif isinstance(node, ast.Call) and ASSERTS.fullmatch(ast.unparse(node.func).rpartition(".")[2]):
            sides = list(node.args)
        elif isinstance(node, ast.Call) and RAISES.fullmatch(ast.unparse(node.func)):
            sides = [*node.args[1:2], *(word.value for word in node.keywords)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "len":
            sides = node.args
        else:
            continue
        expected_ids |= {id(leaf) for side in sides for leaf in leaves_of(side)}
    return loads <= expected_ids


def assigned_to(function: Function, name: str) -> Iterator[ast.expr]:
    """Yield the values that a function assigns to a variable."""
    yield from assigned_values(ast.walk(function), name)


def looped_over(function: Function, name: str) -> Iterator[ast.expr]:
    """Yield the values of a variable in a function's loops over literal rows."""
    for loop in (node for node in ast.walk(function) if isinstance(node, ast.For)):
        yield from _loop_cells(function, loop, name)


def _loop_cells(function: Function, loop: ast.For, name: str) -> Iterator[ast.expr]:
    rows = loop.iter
    if isinstance(rows, ast.Name):
        rows = next(assigned_values(ast.walk(function), rows.id), rows)
    if isinstance(rows, ast.Call) and isinstance(rows.func, ast.Attribute) and rows.func.attr == "items":
        table = rows.func.value
        if isinstance(table, ast.Name):
            table = next(assigned_values(ast.walk(function), table.id), table)
        if isinstance(table, ast.Dict) and isinstance(loop.target, ast.Tuple) and _position(loop.target, name) == 1:
            yield from table.values
        return
    if not isinstance(rows, ast.List | ast.Tuple | ast.Set):
        return
    if isinstance(loop.target, ast.Name) and loop.target.id == name:
        yield from rows.elts
    elif isinstance(loop.target, ast.Tuple) and (position := _position(loop.target, name)) is not None:
        for row in rows.elts:
            if isinstance(row, ast.Tuple | ast.List) and position < len(row.elts):
                yield row.elts[position]


def _position(target: ast.Tuple, name: str) -> int | None:
    names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
    return names.index(name) if name in names else None


def arguments_of(function: Function) -> list[ast.arg]:
    """Return the named arguments of a function."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
