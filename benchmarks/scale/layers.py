"""What the layers of a task take: its source, the git objects that a repository's tasks share, its own repository.

They are modelled as ``images/scripts`` makes them. The first commit of a repository is whole, its *anchor*: other
sources are what differs from it (``source_git.sh``), and its git objects lie in a layer below every task, a file each
(``repository.sh``). A task hides what its commit lacks, and packs its own pieces (``task.sh``).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from benchmarks.scale.blocks import BLOCK, Ledger, directory_bytes
from benchmarks.scale.trees import BEST, GITLINK, LINK, LOOSE, PACK, Object, Repository, compressed

SOURCE, OBJECTS, TASK = "source", "objects", "task"
"""Kinds of layers: each has another time, so that files of different kinds are never one inode."""
_PACK, _INDEX_HEAD, _INDEX_ROW = 32, 1072, 28  # gitformat-pack(5): header and trailer; version 2 index
_ENTRY, _TREE_ROW = 62, 25  # gitformat-index(5): an entry without its path; a row of the cached trees
_WHO = "MiniSandbox <minisandbox@localhost> 946684800 +0000"
_HASH = 1_000_003
_MOST_PIECES, _PIECE, _WHOLE = 64, 16384, 32768

Key = tuple[str, str, bool]


def add_source(ledger: Ledger, objects: Sequence[Object], anchor: Sequence[Object] | None = None) -> None:
    """Count the layer of a source.

    Args:
        ledger: what counts it.
        objects: its tree.
        anchor: the tree that it is stored over; None if it is stored whole.
    """
    below = _files(anchor or ())
    files = _files(objects)
    written = {path: one for path, one in files.items() if _key(one) != _key(below.get(path))}
    counts = Counter(key for one in written.values() if (key := _key(one)) and one.mode != LINK)
    sizes = {_key(one): one.size for one in written.values()}
    under: Counter[Hashable] = Counter(key for one in below.values() if (key := _key(one)) and one.mode != LINK)
    names = _names(objects, anchor or (), written)
    directories = sum(directory_bytes(map(_length, inside)) for inside in names.values())
    ledger.add_layer(
        SOURCE,
        ((key, sizes[key], count) for key, count in counts.items()),
        directories,
        sum(map(len, names.values())),
        under,
    )


def _files(objects: Iterable[Object]) -> dict[str, Object]:
    return {one.path: one for one in objects if one.kind == "blob"}


def _key(one: Object | None) -> tuple[str, str, str] | None:
    return None if one is None else ("blob", one.name, one.mode)


def _length(name: str) -> int:
    return len(name.encode("utf-8", "surrogateescape"))


def _names(objects: Sequence[Object], anchor: Sequence[Object], written: Iterable[str]) -> dict[str, set[str]]:
    """Return the directories of a source's layer with the names in them, those that say "deleted" included."""
    there = {one.path for one in objects}
    known = {one.path for one in anchor}
    paths = {*written, *(one.path for one in objects if one.kind != "blob" and one.path not in known)}
    for path in known - there:
        gone = [path, *(one for one in parents(path) if one not in there)]
        paths.add(gone[-1])
    names: defaultdict[str, set[str]] = defaultdict(set, {"": set()})
    names.update({one.path: set() for one in objects if one.path in paths and one.kind != "blob"})
    for path in paths:
        for inner in (path, *parents(path)):
            parent, _, name = inner.rpartition("/")
            names[parent].add(name)
    return names


def add_objects(ledger: Ledger, repository: Repository, anchor: Sequence[Object]) -> None:
    """Count the layer with the git objects of an anchor's files."""
    repository.measure(anchor, BEST)
    names = shared_objects(anchor)
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


def shared_objects(anchor: Iterable[Object]) -> dict[str, Object]:
    """Return the git objects of an anchor that lie below its repository's tasks: all but the root's tree."""
    return {name: one for name, one in objects_of(anchor).items() if one.path}


def _object_directories(inside: Mapping[str, int]) -> int:
    return sum(directory_bytes([38] * count) for count in inside.values())


def add_task(
    ledger: Ledger, repository: Repository, objects: Sequence[Object], anchor: Sequence[Object], task: str
) -> None:
    """Count the layer of a task: its git objects, what it hides of those below, git's index.

    Args:
        ledger: what counts it.
        repository: where the objects are.
        objects: the task's tree.
        anchor: the tree whose objects lie below.
        task: its name.
    """
    repository.measure(objects, LOOSE, PACK)
    commit = commit_of(objects[0].name, repository)
    has = {commit.name: commit, **objects_of(objects)}
    own, hidden, folders = own_objects(has, shared_objects(anchor), repository.sizes[LOOSE])
    files: list[tuple[tuple[object, ...], int, int]] = []
    shared = shared_objects(anchor) if folders else {}
    again = {name for name in own if name in shared}
    packs = pieces([has[name] for name in own], repository.sizes[LOOSE], again)
    for piece in packs:
        files.append((("pack", piece), _PACK + sum(repository.sizes[PACK][name] for name in piece), 1))
        files.append((("idx", piece), _INDEX_HEAD + _INDEX_ROW * len(piece), 1))
    files += [(("index", task), index_bytes(objects), 1), (("packed-refs", commit.name), 104, 1)]
    files.append((("exclude", repository.path), 100, 1))  # what installing left is ignored
    above = 4 * directory_bytes(())  # testbed, .git, info, objects
    directories = above + directory_bytes([50] * 2 * len(packs)) + _object_directories(hidden)
    ledger.add_layer(TASK, files, directories, len(files) + hidden.total() + len(hidden) + len(folders) + 6)


def commit_of(tree: str, repository: Repository) -> Object:
    """Return the one commit that task.sh makes of a tree; its sizes are noted."""
    text = f"tree {tree}\nauthor {_WHO}\ncommitter {_WHO}\n\nInitial commit\n".encode()
    name = hashlib.sha1(f"commit {len(text)}\0".encode() + text, usedforsecurity=False).hexdigest()
    for way in (LOOSE, PACK):
        repository.sizes[way][name] = compressed("commit", text, way)
    return Object("", "commit", name, len(text), "")


def own_objects(
    has: Collection[str], below: Collection[str], loose: Mapping[str, int]
) -> tuple[list[str], Counter[str], set[str]]:
    """Decide as task.sh's store_objects does.

    Args:
        has: the names of the commit's objects.
        below: those of the objects in the layer below.
        loose: the bytes of an object as a file, by its name.

    Returns:
        The objects that the task packs, in the same order; how many of those below it hides one by one, by their
        directories; the directories that it hides as a whole.
    """
    gone = Counter(name[:2] for name in below if name not in has)
    kept: Counter[str] = Counter()
    for name in has:
        if name in below:
            kept[name[:2]] += loose[name] + _INDEX_ROW
    folders = {folder for folder in gone if kept[folder] < BLOCK}
    cost = sum(loose[name] for name in has if name not in below)
    cost += sum(min(kept[folder], BLOCK) for folder in gone)
    if 2 * cost > sum(loose[name] for name in has):
        return list(has), Counter(), set()
    own = [name for name in has if name not in below or name[:2] in folders]
    return own, Counter({folder: count for folder, count in gone.items() if folder not in folders}), folders


def pieces(own: Sequence[Object], loose: Mapping[str, int], again: Collection[str]) -> list[tuple[str, ...]]:
    """Return the packs that task.sh's pack_in_pieces makes: the names of the objects in each.

    Args:
        own: what is packed, as ``git rev-list --objects`` lists it.
        loose: the bytes of an object as a file, by its name.
        again: the names of those that are below too, in directories that are hidden.
    """
    sizes: Counter[str] = Counter()
    for one in own:
        if one.name not in again:
            sizes[one.kind] += loose[one.name]
    of = {kind: _power(size) for kind, size in sizes.items()}
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for number, one in enumerate(own):
        top = number < 2 or sizes.total() < _WHOLE or one.name in again
        found[("top", 0) if top else (one.kind, path_hash(one.path) % of[one.kind])].append(one.name)
    return [tuple(names) for names in found.values()]


def _power(size: int) -> int:
    of = 1
    while of < _MOST_PIECES and of * _PIECE < size:
        of *= 2
    return of


@cache
def path_hash(path: str) -> int:
    """The number that task.sh makes of a path."""
    found = 0
    for byte in path.encode("utf-8", "surrogateescape"):
        found = (found * 31 + byte) % _HASH
    return found


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
