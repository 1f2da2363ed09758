"""What the layers of a task take: its source, the git objects that a repository's tasks share, its own repository.

They are modelled as ``images/scripts`` makes them. The source of a commit is a layer (``source_git.sh``), its git
objects are another, a file each (``repository.sh``). A task hides what its commit lacks, and packs its own objects
(``task_commit.sh``).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.scale.blocks import Ledger, directory_bytes
from benchmarks.scale.trees import BEST, GITLINK, LINK, LOOSE, PACK, Object, Repository, compressed

SOURCE, OBJECTS, TASK = "source", "objects", "task"
"""Kinds of layers: each has another time, so that files of different kinds are never one inode."""
_PACK, _INDEX_HEAD, _INDEX_ROW = 32, 1072, 28  # gitformat-pack(5): header and trailer; version 2 index
_ENTRY, _TREE_ROW = 62, 25  # gitformat-index(5): an entry without its path; a row of the cached trees
_WHO = "MiniSandbox <minisandbox@localhost> 946684800 +0000"


def add_source(ledger: Ledger, objects: Sequence[Object]) -> None:
    """Count the layer of a source.

    Args:
        ledger: what counts it.
        objects: its tree.
    """
    files = _files(objects).values()
    counts = Counter(_key(one) for one in files if one.mode != LINK)
    sizes = {_key(one): one.size for one in files}
    names = _names(objects)
    directories = sum(directory_bytes(map(_length, inside)) for inside in names.values())
    entries = sum(map(len, names.values()))
    ledger.add_layer(SOURCE, ((key, sizes[key], count) for key, count in counts.items()), directories, entries)


def _files(objects: Iterable[Object]) -> dict[str, Object]:
    return {one.path: one for one in objects if one.kind == "blob"}


def _key(one: Object) -> tuple[str, str, str]:
    return "blob", one.name, one.mode


def _length(name: str) -> int:
    return len(name.encode("utf-8", "surrogateescape"))


def _names(objects: Sequence[Object]) -> dict[str, set[str]]:
    """Return the directories of a source's layer with the names in them."""
    names: defaultdict[str, set[str]] = defaultdict(set, {"": set()})
    names.update({one.path: set() for one in objects if one.kind != "blob"})
    for one in objects:
        for inner in (one.path, *parents(one.path)):
            if inner:
                parent, _, name = inner.rpartition("/")
                names[parent].add(name)
    return names


def add_objects(ledger: Ledger, repository: Repository, objects: Sequence[Object]) -> None:
    """Count the layer with the git objects of a commit's files."""
    repository.measure(objects, BEST)
    names = shared_objects(objects)
    files = [((BEST, name), repository.sizes[BEST][name], 1) for name in names]
    files += [(("git", name), 100, 1) for name in ("HEAD", "config", "exclude")]
    inside = Counter(name[:2] for name in names)
    above = 6 * directory_bytes(())  # testbed, .git, objects, refs, heads, info
    ledger.add_layer(OBJECTS, files, above + _object_directories(inside), len(files) + len(inside) + 7)


def objects_of(objects: Iterable[Object]) -> dict[str, Object]:
    """Return the git objects of a tree by name, each as it comes first, as ``git rev-list --objects`` lists them."""
    found: dict[str, Object] = {}
    for one in objects:
        if one.mode != GITLINK:
            found.setdefault(one.name, one)
    return found


def shared_objects(objects: Iterable[Object]) -> dict[str, Object]:
    """Return the git objects of a commit that lie below its tasks: all but the root's tree."""
    return {name: one for name, one in objects_of(objects).items() if one.path}


def _object_directories(inside: Mapping[str, int]) -> int:
    return sum(directory_bytes([38] * count) for count in inside.values())


def add_task(
    ledger: Ledger, repository: Repository, objects: Sequence[Object], below: Sequence[Object], task: str
) -> None:
    """Count the layer of a task: its git objects, what it hides of those below, git's index.

    Args:
        ledger: what counts it.
        repository: where the objects are.
        objects: the task's tree.
        below: the tree whose objects lie below.
        task: its name.
    """
    repository.measure(objects, LOOSE, PACK)
    commit = commit_of(objects[0].name, repository)
    has = {commit.name: commit, **objects_of(objects)}
    own, hidden = own_objects(has, shared_objects(below))
    files: list[tuple[tuple[object, ...], int, int]] = [
        (("pack", *own), _PACK + sum(repository.sizes[PACK][name] for name in own), 1),
        (("idx", *own), _INDEX_HEAD + _INDEX_ROW * len(own), 1),
    ]
    files += [(("index", task), index_bytes(objects), 1), (("packed-refs", commit.name), 104, 1)]
    files.append((("exclude", repository.path), 100, 1))  # what installing left is ignored
    directories = 5 * directory_bytes(()) + _object_directories(hidden)  # testbed, .git, info, objects, pack
    ledger.add_layer(TASK, files, directories, len(files) + hidden.total() + len(hidden) + 6)


def commit_of(tree: str, repository: Repository) -> Object:
    """Return the one commit that task_commit.sh makes of a tree; its sizes are noted."""
    text = f"tree {tree}\nauthor {_WHO}\ncommitter {_WHO}\n\nInitial commit\n".encode()
    name = hashlib.sha1(f"commit {len(text)}\0".encode() + text, usedforsecurity=False).hexdigest()
    for way in (LOOSE, PACK):
        repository.sizes[way][name] = compressed("commit", text, way)
    return Object("", "commit", name, len(text), "")


def own_objects(has: Iterable[str], below: Iterable[str]) -> tuple[list[str], Counter[str]]:
    """Decide as task_commit.sh does.

    Args:
        has: the names of the commit's objects.
        below: those of the objects in the layer below.

    Returns:
        The objects that the task packs; how many of those below it hides, by their directories.
    """
    wanted, there = dict.fromkeys(has), set(below)
    return [name for name in wanted if name not in there], Counter(name[:2] for name in there if name not in wanted)


def index_bytes(objects: Iterable[Object]) -> int:
    """The size of git's index of a tree, version 2, and of the trees that it caches."""
    total = 12 + 20 + 8
    for one in objects:
        path = one.path.encode("utf-8", "surrogateescape")
        if one.kind == "tree":
            total += _TREE_ROW + len(path.rpartition(b"/")[2])
        else:
            total += (_ENTRY + len(path) + 8) // 8 * 8  # one to eight NULs, up to a multiple of eight
    return total


def parents(path: str) -> Iterator[str]:
    """Yield the directories above a path, not the root."""
    while path := path.rpartition("/")[0]:
        yield path
