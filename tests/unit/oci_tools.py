"""Archives and images made byte by byte, for tests of what reads them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.store.blobs.streams import Blob, LayerStream
from minisandbox.store.blobs.unpack import Bounds, Unpacked, unpack

END = bytes(1024)


def header(
    name: bytes | str,
    kind: bytes = b"0",
    size: int = 0,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 1_700_000_000,
    target: bytes | str = b"",
    raw_size: bytes | None = None,
    prefix: bytes = b"",
) -> bytes:
    """One ustar header."""
    name, target = (text.encode() if isinstance(text, str) else text for text in (name, target))
    number = b"%011o\0"
    block = b"".join((
        name.ljust(100, b"\0")[:100], b"%07o\0" % mode, b"%07o\0" % uid, b"%07o\0" % gid,
        raw_size or number % size, number % mtime, b" " * 8, kind, target.ljust(100, b"\0")[:100],
        b"ustar\x0000".ljust(88, b"\0"), prefix,
    )).ljust(512, b"\0")  # fmt: skip
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padded(data: bytes) -> bytes:
    """Data, padded to a block."""
    return data + bytes(-len(data) % 512)


def entry(name: bytes | str, data: bytes = b"", kind: bytes = b"0", **more: object) -> bytes:
    """A header with its content."""
    return header(name, kind, len(data), **more) + padded(data)  # type: ignore[arg-type]


def folder(name: str, **more: object) -> bytes:
    """A directory."""
    return header(name, b"5", **{"mode": 0o755, **more})  # type: ignore[arg-type]


def link(name: str, target: str | bytes) -> bytes:
    """A symbolic link."""
    return entry(name, kind=b"2", target=target)


def hard_link(name: str, target: str | bytes) -> bytes:
    """A hard link."""
    return entry(name, kind=b"1", target=target)


def record(key: str | bytes, value: bytes) -> bytes:
    """One record of a pax header."""
    key = key.encode() if isinstance(key, str) else key
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while length != len(body) + len(b"%d" % length):
        length = len(body) + len(b"%d" % length)
    return b"%d" % length + body


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    """A pax header of these records."""
    return entry("PaxHeaders", b"".join(records), kind)


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    """A GNU header for a long name (or, of the kind ``K``, a link's long target)."""
    return entry("././@LongLink", name + b"\0", kind)


def unpack_bytes(data: bytes, tree: Path, *below: Path, bounds: Bounds | None = None, **more: bool) -> Unpacked:
    """Unpack an archive; it is checked that all of it can be read."""
    with LayerStream(Blob(io.BytesIO(data), "", "layer"), 1 << 40) as stream:
        return unpack(
            stream, tree, lambda: LowerLayers(below), keep_owners=more.get("keep_owners", False), bounds=bounds
        )


def digest(data: bytes) -> str:
    """The digest of a blob."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class MadeImage:
    """A container image in memory.

    Attributes:
        tars: its layers' tars.
        config: what ``config`` of its configuration holds.
        kinds: the layers' media types.
        top: further fields of its configuration.
        blobs: by their digests, once it is made.
    """

    tars: Sequence[bytes]
    config: Mapping[str, object] = field(default_factory=dict)
    architecture: str = "amd64"
    pack: object = staticmethod(lambda tar: gzip.compress(tar, 1, mtime=0))
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifest: bytes = b""
    kinds: Sequence[str] = ()
    top: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        packed = [self.pack(tar) for tar in self.tars]  # type: ignore[operator]
        config = json.dumps({
            "os": "linux", "architecture": self.architecture, "config": dict(self.config),
            "rootfs": {"type": "layers", "diff_ids": [digest(tar) for tar in self.tars]}, **self.top,
        }).encode()  # fmt: skip
        kinds = self.kinds or ["application/vnd.oci.image.layer.v1.tar+gzip"] * len(packed)
        self.manifest = json.dumps({
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.describe(config, "application/vnd.oci.image.config.v1+json"),
            "layers": [self.describe(blob, kind) for blob, kind in zip(packed, kinds, strict=True)],
        }).encode()  # fmt: skip
        self.describe(self.manifest, "")

    def describe(self, blob: bytes, kind: str) -> dict[str, object]:
        """Keep a blob; return its descriptor."""
        self.blobs[digest(blob)] = blob
        return {"digest": digest(blob), "size": len(blob), "mediaType": kind}

    def row(self, tag: str = "") -> dict[str, object]:
        """Its row in an index."""
        row: dict[str, object] = {
            "digest": digest(self.manifest), "size": len(self.manifest),
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "platform": {"os": "linux", "architecture": self.architecture},
        }  # fmt: skip
        return {**row, "annotations": {"org.opencontainers.image.ref.name": tag}} if tag else row

    def write_layout(self, path: Path, *others: MadeImage, tags: Sequence[str] = ()) -> Path:
        """Write an OCI layout."""
        images = (self, *others)
        (path / "blobs/sha256").mkdir(parents=True)
        for image in images:
            for name, blob in image.blobs.items():
                (path / "blobs" / name.replace(":", "/")).write_bytes(blob)
        rows = [image.row(tag) for image, tag in zip(images, tags or [""] * len(images), strict=True)]
        (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return path

    def docker_archive(self, *tags: str) -> bytes:
        """What ``docker save`` of version 24 writes."""
        config = next(blob for blob in self.blobs.values() if b'"rootfs"' in blob)
        names = [f"{digest(tar)[7:]}/layer.tar" for tar in self.tars]
        table = [{"Config": f"{digest(config)[7:]}.json", "RepoTags": list(tags), "Layers": names}]
        files = [entry(name, tar) for name, tar in dict(zip(names, self.tars, strict=True)).items()]
        return b"".join(
            (
                *files,
                entry(f"{digest(config)[7:]}.json", config),
                entry("manifest.json", json.dumps(table).encode()),
                END,
            )
        )
