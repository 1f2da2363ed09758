"""The parsers of untrusted files as functions of bytes, with their seeds and mutators.

A parser may raise its documented errors. Every other exception, a hang and the use of much memory are findings.
"""

from __future__ import annotations

import io
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from minisandbox.errors import DockerfileError, ImageRefused, NotFound
from minisandbox.images.dockerfile.evaluation import BuildOptions, evaluate
from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.images.oci.config import volumes
from minisandbox.images.oci.layout import DockerArchive, Files
from minisandbox.images.oci.manifest import Manifest, Platform, container, find_manifest, layers_of
from minisandbox.store import remove_tree
from minisandbox.store.blobs.streams import Blob, LayerStream
from minisandbox.store.blobs.unpack import Bounds, unpack
from minisandbox.values import JSONValue
from tests.unit.dockerfile_tools import BASE, NOWHERE
from tests.unit.oci_tools import END, MadeImage, entry, folder, hard_link, link, long_name, pax, record

CASES = Path(__file__).parents[1] / "dockerfiles" / "cases"
BLOCK = 512
SECRET = b"outside of the tree"
LIMIT = 16 << 20  # bytes of an unpacked layer, so that a bomb is refused early
PLATFORM = Platform("linux", "amd64")
Mutate = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser.

    Attributes:
        run: parses bytes, and raises if the parser has a fault.
        seeds: yields inputs to start from.
        mutate: changes an input, by the fuzzer's own mutations (the first argument) and with a random source.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Callable[[Mutate, bytes, random.Random], bytes]


# --- layers ----------------------------------------------------------------------------------------------------------


def run_tar(data: bytes) -> None:
    """Unpack a layer; no file outside of its tree may change."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-tar-"))
    outside = directory / "outside"
    outside.write_bytes(SECRET)
    (directory / "work").mkdir()
    try:
        with suppress(ImageRefused), LayerStream(Blob(io.BytesIO(data), "", "layer"), LIMIT) as stream:
            unpack(stream, directory / "work/tree", None, keep_owners=False, bounds=Bounds(LIMIT, 1000, 1 << 20, 0))
        assert outside.read_bytes() == SECRET
        assert {path.name for path in directory.iterdir()} == {"outside", "work"}
        assert {path.name for path in (directory / "work").iterdir()} <= {"tree", "tree.removed"}
    finally:
        remove_tree(directory)


def tar_seeds() -> Iterator[bytes]:
    """Yield a small archive of each kind of member."""
    attribute = record("SCHILY.xattr.user.note", b"a\nb=c")
    yield folder("d") + entry("d/f", b"x" * 600, mode=0o4755) + link("l", "/d") + hard_link("l/h", "d/f") + END
    yield pax(record("path", b"p" * 200), record("size", b"3"), attribute) + entry("short", b"abc") + END
    yield long_name(b"n" * 150) + long_name(b"t" * 150, b"K") + link("l", "t") + entry("fifo", kind=b"6") + END
    yield entry("a/.wh.b") + entry("a/.wh..wh..opq") + entry("dev/null", kind=b"3") + entry("a", b"1") + END
    yield (
        pax(record("mtime", b"1700000000.5"), record("uid", b"70000")) + entry("e") + link("..", "../../outside") + END
    )
    yield entry("huge", raw_size=b"\x80" + bytes(10) + b"\x01") + END  # a number of base 256


def mutate_tar(mutate: Mutate, data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or copy, move or remove a block; then repair most checksums, which would end the reading."""
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    if len(blocks) > 1 and chance.random() < 0.2:
        block = blocks.pop(chance.randrange(len(blocks))) if chance.random() < 0.5 else chance.choice(blocks)
        if chance.random() < 0.7:
            blocks.insert(chance.randrange(len(blocks) + 1), block)
    else:
        changed = mutate(data)
        blocks = [changed[at : at + BLOCK] for at in range(0, len(changed), BLOCK)]
    keep = chance.random()
    for number, block in enumerate(blocks):
        if len(block) == BLOCK and block[257:262] == b"ustar" and chance.random() > keep / 10:
            total = sum(block) - sum(block[148:156]) + 8 * 32
            blocks[number] = block[:148] + b"%06o\0 " % total + block[156:]
    return b"".join(blocks)


# --- manifests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneFile:
    """An archive in which every name leads to the same file."""

    first: bytes
    rest: bytes
    name: str = "archive"

    def has(self, name: str) -> bool:
        """Return True."""
        return bool(name)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open the file."""
        yield io.BytesIO(self.first if name == "manifest.json" else self.rest)


def run_manifest(data: bytes) -> None:
    """Read documents separated by NUL bytes: indexes, a manifest, its configuration; also those of `docker save`."""
    *documents, config = data.split(b"\0")
    remaining = iter(documents)
    with suppress(ImageRefused, NotFound):
        values = find_manifest("v", lambda version: (version, next(remaining, b"{}")), PLATFORM, "image")[1]
        descriptors = layers_of(values, "image")[1]
        check_container(Manifest("sha256:" + "0" * 64, config, tuple(descriptors)))
    with suppress(ImageRefused, NotFound):
        archive = DockerArchive(cast("Files", OneFile(b"".join(documents[:1]), config)), "")
        archive.tags()
        check_container(archive.manifest(PLATFORM))


def check_container(manifest: Manifest) -> None:
    """Read everything that the manifest describes; what was accepted can be written again."""
    image = container(manifest, "image", PLATFORM)
    assert len(image.layers) == len(manifest.blobs)
    assert image.config.workdir.startswith("/")
    assert not any("\0" in text for pair in image.config.environment.items() for text in pair)
    volumes(image.config.fields)
    json.dumps([dict(image.config.fields), image.config.notes, image.config.user, str(image.platform)]).encode()


def manifest_seeds() -> Iterator[bytes]:
    """Yield an image in the layouts of OCI and of `docker save`."""
    fields = {"Env": ["A=b"], "Entrypoint": "sh", "Volumes": {"/v": {}}, "Labels": {"a": "b"}, "WorkingDir": "w"}
    image = MadeImage([END, END], fields)
    config = next(blob for blob in image.blobs.values() if b'"rootfs"' in blob)
    index = json.dumps({"schemaVersion": 2, "manifests": [image.row("latest")]}).encode()
    yield b"\0".join((index, image.manifest, config))
    yield b"\0".join((image.manifest, config))
    yield b"\0".join((json.dumps([{"Config": "c", "RepoTags": ["a:b"], "Layers": ["l", "m"]}]).encode(), config))


def mutate_manifest(mutate: Mutate, data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or replace one value of one document by an odd one or by another value of the document."""
    documents = data.split(b"\0")
    number = chance.randrange(len(documents))
    try:
        value: JSONValue = json.loads(documents[number])
    except (ValueError, RecursionError):
        return mutate(data)
    if chance.random() < 0.3:
        return mutate(data)
    documents[number] = json.dumps(changed_value(value, chance)).encode()
    return b"\0".join(documents)


ODD: tuple[JSONValue, ...] = (
    None, True, -1, 0, 1 << 70, 1e308, "", "\ud800", "a\0", "\u00b2", "=", "..", "sha256:" + "0" * 64,
    [], [[]], {}, {"": None},
)  # fmt: skip


def changed_value(value: JSONValue, chance: random.Random) -> JSONValue:
    """Return a value of JSON with one change at a random depth."""
    if isinstance(value, Mapping) and value and chance.random() < 0.8:
        name = chance.choice([*value])
        new = {**value, name: changed_value(value[name], chance)}
        if chance.random() < 0.1:
            new[chance.choice(("", name.swapcase(), "mediaType", "manifests", "platform"))] = new.pop(name)
        return new
    if isinstance(value, list) and value and chance.random() < 0.8:
        number = chance.randrange(len(value))
        change = chance.choice(([changed_value(value[number], chance)], [], [value[number]] * 2))
        return [*value[:number], *change, *value[number + 1 :]]
    return chance.choice(ODD)


# --- Dockerfiles -----------------------------------------------------------------------------------------------------


def run_dockerfile(data: bytes) -> None:
    """Parse and evaluate a Dockerfile."""
    with suppress(DockerfileError, UnicodeDecodeError):
        text = data.decode("utf-8-sig")
        evaluate(parse_dockerfile(text), BuildOptions(arguments={"A": "given"}), lambda _: BASE, NOWHERE)  # type: ignore[arg-type,return-value]


def dockerfile_seeds() -> Iterator[bytes]:
    """Yield the Dockerfiles that `make dockerfile-conformance` builds."""
    return (path.read_bytes() for path in sorted(CASES.glob("*.Dockerfile")))


def mutate_dockerfile(mutate: Mutate, data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or copy, move or remove a line."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2 or chance.random() < 0.8:
        return mutate(data)
    line = lines.pop(chance.randrange(len(lines))) if chance.random() < 0.5 else chance.choice(lines)
    if chance.random() < 0.7:
        lines.insert(chance.randrange(len(lines) + 1), line)
    return b"".join(lines)


TARGETS: Mapping[str, Target] = {
    "tar": Target(run_tar, tar_seeds, mutate_tar),
    "manifest": Target(run_manifest, manifest_seeds, mutate_manifest),
    "dockerfile": Target(run_dockerfile, dockerfile_seeds, mutate_dockerfile),
}
