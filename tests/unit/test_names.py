"""A ratchet: how many names of each package say too little. ``python tests/golden/update.py`` lowers the numbers."""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Iterator

from tests.golden import GOLDEN, UPDATE
from tests.unit.test_house import house_of, parse, source_files

# Pronouns, participles and metaphors: a reader learns nothing of the value.
VAGUE = {
    "one", "found", "made", "asked", "known", "place", "places", "told", "kept", "given", "said", "left", "whole",
    "own", "wanted", "taken", "gone", "news", "tell", "say", "word", "words", "texts", "thing", "things", "most",
    "least", "room", "rest", "begun", "beside",
}  # fmt: skip
LIMITS = GOLDEN / "vague_names.json"


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of variables and parameters, without those of comprehensions, whose uses stand next to them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        if not isinstance(node, ast.comprehension):
            yield from bound_names(node)


def vague_names() -> Counter[str]:
    counts: Counter[str] = Counter()
    for path in source_files():
        counts[house_of(path)] += sum(name.strip("_") in VAGUE for name in bound_names(parse(path)))
    return counts


def test_comprehensions_may_be_short() -> None:
    tree = ast.parse("def f(one, b):\n    found, c = [place for place in b], 1\n    for word in b: pass\n")
    assert sorted(bound_names(tree)) == ["b", "c", "found", "one", "word"]


def test_vague_names_get_fewer() -> None:
    counts, limits = vague_names(), Counter(json.loads(LIMITS.read_text()))
    if os.environ.get(UPDATE):
        lower = {name: min(count, limits.get(name, 0)) for name, count in sorted(counts.items()) if count}
        LIMITS.write_text(json.dumps(lower, indent=1) + "\n")
    more = {name: f"{count}, at most {limits[name]}" for name, count in counts.items() if count > limits[name]}
    assert not more, f"{more}: name what a value is: path, layer, match; not {', '.join(sorted(VAGUE))}"
