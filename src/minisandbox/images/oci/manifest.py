"""Parse untrusted indexes, manifests and configurations of container images (image-spec 1.1; Docker's schema 2)."""

from __future__ import annotations

import json
import platform as machine
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from minisandbox.errors import ImageRefused, InvalidValue, NotFound
from minisandbox.images.oci.config import RunConfig, read_config
from minisandbox.store.blobs.streams import check_digest
from minisandbox.values import JSONValue

MOST_MANIFEST = 4 << 20
"""The maximum size of an index or a manifest in bytes (distribution-spec: registries accept at least 4 MiB)."""
MOST_CONFIG = 16 << 20
MOST_LAYER = 128 << 30
"""The maximum size of a layer's blob, and of its uncompressed tar, in bytes."""
_MOST_LAYERS = 500
_MOST_LEVELS = 100
_MOST_INDEXES = 3
INDEX, MANIFEST = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"
_INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_MANIFESTS = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
SET, FILES = "application/vnd.minisandbox.set.v1", "application/vnd.minisandbox.files.v1"
"""The artifact types of a set's index, and of the files that travel with a set."""
EMPTY, TITLE = "application/vnd.oci.empty.v1+json", "org.opencontainers.image.title"
MOST_FILE = 256 << 20
"""The maximum size of a file that travels with a set, in bytes."""
REF_NAME, _IMAGE_NAME = "org.opencontainers.image.ref.name", "io.containerd.image.name"
ACCEPTED = ", ".join((*_MANIFESTS, *_INDEXES))
# Go's names (GOARCH) for the architecture names of uname(2) and other programs (containerd, platforms/database.go).
_ARCHITECTURES = {
    "x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "i386": "386",
}  # fmt: skip
_USUAL = {"amd64": "v1", "arm64": "v8", "arm": "v7"}
"""The default variant of each architecture (containerd, platforms/database.go)."""

JSONObject = Mapping[str, JSONValue]


@dataclass(frozen=True, slots=True)
class Platform:
    """The operating system and processor that an image needs.

    Attributes:
        os: the operating system, for example ``linux``.
        architecture: Go's name of the architecture, for example ``amd64``.
        variant: the variant of the architecture, for example ``v8``; "" for any.
    """

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        """Return ``OS/ARCHITECTURE[/VARIANT]``."""
        return "/".join(filter(None, (self.os, self.architecture, self.variant)))

    @property
    def usual(self) -> str:
        """The variant, or else the architecture's default variant."""
        return self.variant or _USUAL.get(self.architecture, "")

    @property
    def is_tried(self) -> bool:
        """Return whether MiniSandbox has been tested with images for this platform."""
        return (self.os, self.architecture) == ("linux", "amd64")

    def fits(self, other: Platform) -> bool:
        """Return whether an image for the platform ``other`` runs on this platform."""
        return (self.os, self.architecture) == (other.os, other.architecture) and (
            not self.variant or self.usual == other.usual
        )


def parse_platform(text: str) -> Platform:
    """Parse ``OS/ARCHITECTURE[/VARIANT]``.

    Raises:
        InvalidValue: the string has another form.
    """
    components = text.split("/")
    if len(components) not in (2, 3) or not all(components):
        raise InvalidValue(f"{text!r} is not a platform", hint="give OS/ARCHITECTURE, such as linux/amd64")
    return Platform(components[0], _ARCHITECTURES.get(components[1], components[1]), *components[2:])


def own_platform() -> Platform:
    """Return this machine's platform."""
    return Platform("linux", _ARCHITECTURES.get(machine.machine(), machine.machine()))


def platform_or_own(text: str | None) -> Platform:
    """Parse a platform like ``linux/arm64``; return this machine's platform if the string is empty or None.

    Raises:
        InvalidValue: the string is malformed.
    """
    return parse_platform(text) if text else own_platform()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """An OCI descriptor: a reference to a blob by its digest.

    Attributes:
        digest: the digest of the content.
        size: the size of the content in bytes; -1 if unknown.
        media_type: the media type of the content.
        platform: the platform of a manifest according to its index, or None.
        name: the tag of a manifest in a layout, or "".
        image: the full reference of a manifest that containerd records in a layout, or "".
        title: the name of a file that travels with a set, or "".
    """

    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None
    name: str = ""
    image: str = ""
    title: str = ""

    @property
    def is_foreign(self) -> bool:
        """Return whether registries must not distribute the layer (layer.md, "Non-Distributable Layers")."""
        return "foreign" in self.media_type or "nondistributable" in self.media_type


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a container image.

    Attributes:
        diff_id: the digest of the uncompressed tar.
        blob: the descriptor of the blob.
    """

    diff_id: str
    blob: Descriptor


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest, with the text of its configuration.

    Attributes:
        digest: the digest of the manifest, or of the configuration if there is no manifest.
        config: the configuration's text.
        blobs: the descriptors of the layers' blobs, bottom first.
        kind: the configuration's media type.
        names: the references by which an archive names the image.
    """

    digest: str
    config: bytes
    blobs: tuple[Descriptor, ...]
    kind: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Container:
    """The metadata of a container image, without the content of its layers.

    Attributes:
        digest: the digest of the manifest, or of the configuration if there is no manifest.
        config: the run configuration.
        platform: the platform of the image.
        layers: the layers, bottom first.
    """

    digest: str
    config: RunConfig
    platform: Platform
    layers: tuple[Layer, ...]


def blob_path(digest: str) -> str:
    """Return the path of a blob in a layout (image-layout.md)."""
    return "blobs/" + digest.replace(":", "/")


def malformed(subject: str, reason: str) -> ImageRefused:
    """Return the error for a malformed document."""
    return ImageRefused(f"{subject} is malformed", reason=reason[:300], hint="push or save the image again")


def foreign_layer(subject: str, layer: Descriptor) -> NotFound:
    """Return the error for a foreign layer whose blob is missing in the source."""
    return NotFound(
        f"{subject} lacks its layer {layer.digest}",
        reason="the layer's licence keeps it elsewhere (a nondistributable layer)",
        hint="take the image from a source that holds the layer, or build an image without it",
    )


def text_of(fields: JSONObject, name: str) -> str:
    """Return a string field of a configuration, or "" if it is missing.

    Raises:
        ImageRefused: the field has another type.
    """
    text = fields.get(name) or ""
    if not isinstance(text, str) or "\0" in text:
        raise malformed("the image's configuration", f"{name} is {text!r}")
    return text


def texts_of(fields: JSONObject, name: str) -> tuple[str, ...]:
    """Return a field of a configuration that is a list of strings; empty if the field is missing.

    Raises:
        ImageRefused: the field has another type.
    """
    texts = fields.get(name) or ()
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise malformed("the image's configuration", f"{name} is {texts!r}")
    return tuple(cast("Sequence[str]", texts))


def parse_json(text: bytes, subject: str) -> JSONValue:
    """Parse JSON; reject infinite numbers, unpaired surrogates and deep nesting, which cannot be serialized again.

    Raises:
        ImageRefused: the text is not JSON, or contains such a value.
    """
    try:
        value: JSONValue = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise malformed(subject, f"it is not JSON: {error}; it begins with {text[:60]!r}") from None
    if not _is_shallow(value, _MOST_LEVELS):
        raise malformed(subject, f"it has more than {_MOST_LEVELS} levels")
    return value


def _is_shallow(value: JSONValue, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_is_shallow(child, levels - 1) for child in children)


def parse_object(text: bytes, subject: str) -> JSONObject:
    """Parse a JSON object.

    Raises:
        ImageRefused: the text is not a JSON object.
    """
    document = parse_json(text, subject)
    if not isinstance(document, dict):
        raise malformed(subject, f"it is no JSON object, but begins with {text[:60]!r}")
    return document


def find_manifest(
    version: str, read: Callable[[str], tuple[str, bytes]], platform: Platform, subject: str
) -> tuple[str, JSONObject]:
    """Return the digest and the content of the manifest for a platform; follow indexes, which may be nested.

    Args:
        version: the tag or digest of a manifest or an index.
        read: a function that returns the digest and the text of a tag or digest.
        platform: the requested platform.
        subject: the image's name in errors.

    Raises:
        NotFound: an index has no manifest for the platform.
        ImageRefused: the index or manifest is malformed.
    """
    for _ in range(_MOST_INDEXES + 1):
        digest, text = read(version)
        document = parse_object(text, f"the manifest {digest} of {subject}")
        is_index = "manifests" in document or document.get("mediaType") in _INDEXES
        if not is_index:
            return digest, document
        version = choose(document, platform, subject).digest
    raise malformed(subject, f"it is behind more than {_MOST_INDEXES} indexes")


def choose(index: JSONObject, platform: Platform, subject: str) -> Descriptor:
    """Choose the manifest for a platform from an index, or else the first manifest that states no platform.

    Raises:
        NotFound: the index has no such manifest.
        ImageRefused: the index is malformed.
    """
    entries = manifests(index, subject)
    suitable = [entry for entry in entries if entry.platform is not None and platform.fits(entry.platform)]
    if suitable:  # prefer the default variant: amd64/v3 may come first, but needs a newer CPU
        return min(suitable, key=lambda entry: entry.platform is None or entry.platform.usual != platform.usual)
    for entry in entries:
        if entry.platform is None:
            return entry
    # do not list attestations, which have the operating system "unknown"
    platforms = {str(entry.platform) for entry in entries if entry.platform and entry.platform.os != "unknown"}
    raise _no_image(subject, platform, ", ".join(sorted(platforms)))


def manifests(index: JSONObject, subject: str) -> list[Descriptor]:
    """Return the manifests and indexes in an index; ignore entries of other media types (image-index.md).

    Raises:
        ImageRefused: the index is malformed.
    """

    def is_image(row: JSONValue) -> bool:
        kind = row.get("mediaType") if isinstance(row, Mapping) else None
        return not kind or not isinstance(kind, str) or kind in (*_MANIFESTS, *_INDEXES)

    return [descriptor(row, subject) for row in _rows(index, "manifests", subject) if is_image(row)]


def _rows(document: JSONObject, name: str, subject: str) -> list[JSONValue]:
    rows = document.get(name)
    if not isinstance(rows, list):
        raise malformed(subject, f"{name!r} is no list")
    return rows


def descriptor(row: JSONValue, subject: str) -> Descriptor:
    """Parse a descriptor.

    Raises:
        ImageRefused: the descriptor is malformed.
    """
    if not isinstance(row, Mapping):
        raise malformed(subject, f"a descriptor is {row!r}")
    digest, size, kind = row.get("digest"), row.get("size"), row.get("mediaType") or ""
    if not isinstance(digest, str) or type(size) is not int or size < 0 or not isinstance(kind, str):
        raise malformed(subject, f"a descriptor is {row!r}")
    name, image, title = _texts(row.get("annotations"), REF_NAME, _IMAGE_NAME, TITLE)
    platform = _platform(row.get("platform"))
    return Descriptor(check_digest(digest), size, kind, platform if platform.architecture else None, name, image, title)


def _texts(document: JSONValue, *names: str) -> list[str]:
    """Return string fields of an object; a missing or malformed field is ""."""
    fields = document if isinstance(document, Mapping) else {}
    return [text if isinstance(text := fields.get(name), str) else "" for name in names]


def _platform(document: JSONValue) -> Platform:
    """Read the platform of a descriptor or a configuration; missing and malformed parts become ""."""
    system, architecture, variant = _texts(document, "os", "architecture", "variant")
    return Platform(
        system.lower(), _ARCHITECTURES.get(architecture, architecture), f"v{variant}" if variant.isdigit() else variant
    )


def layers_of(manifest: JSONObject, subject: str) -> tuple[Descriptor, list[Descriptor]]:
    """Return a manifest's configuration and layers.

    Raises:
        ImageRefused: the document is malformed, or not a manifest of a container image.
    """
    if manifest.get("schemaVersion") == 1:
        raise ImageRefused(
            f"{subject} is a manifest of Docker's schema 1",
            reason="it was pushed before 2017; current engines do not read it either",
            hint="push the image again",
        )
    config = descriptor(manifest.get("config"), subject)
    layers = [descriptor(row, subject) for row in _rows(manifest, "layers", subject)]
    for layer in layers:
        if layer.media_type.endswith("+encrypted"):
            raise ImageRefused(
                f"{subject} is encrypted", reason="its layers need a key", hint="push it without encryption"
            )
        if layer.size > MOST_LAYER:
            raise ImageRefused(
                f"{subject} has the layer {layer.digest} of {layer.size} bytes", hint=f"{MOST_LAYER} bytes are allowed"
            )
    media_types = "".join(layer.media_type for layer in layers)
    if media_types and "tar" not in media_types:
        raise ImageRefused(
            f"{subject} is no container image",
            reason=f"its content is {layers[0].media_type!r}: an artifact of another kind",
            hint="check the reference",
        )
    return config, layers


def container(manifest: Manifest, subject: str, platform: Platform) -> Container:
    """Return the image that a manifest and its configuration describe.

    Args:
        manifest: the manifest.
        subject: the image's name in errors.
        platform: the platform that the image must run on.

    Raises:
        ImageRefused: the configuration lists no layers, or another number of layers than the manifest.
        NotFound: the image is for another platform.
    """
    document, blobs = parse_object(manifest.config, f"the configuration of {subject}"), manifest.blobs
    root = document.get("rootfs")
    diff_ids = root.get("diff_ids") if isinstance(root, Mapping) else None
    if not isinstance(diff_ids, list) or not all(isinstance(diff_id, str) for diff_id in diff_ids):
        raise malformed(f"the configuration of {subject}", "rootfs.diff_ids is no list of digests")
    if len(diff_ids) != len(blobs):
        raise malformed(subject, f"it has {len(blobs)} layers, its configuration {len(diff_ids)}")
    if len(diff_ids) > _MOST_LAYERS:
        raise malformed(subject, f"it has {len(diff_ids)} layers; {_MOST_LAYERS} can be used")
    layers = tuple(Layer(check_digest(str(diff_id)), blob) for diff_id, blob in zip(diff_ids, blobs, strict=True))
    stated = _platform(cast("JSONValue", document))
    image_platform = Platform(stated.os or platform.os, stated.architecture or platform.architecture, stated.variant)
    if not platform.fits(replace(image_platform, variant=image_platform.variant or platform.variant)):
        raise _no_image(subject, platform, str(image_platform))
    return Container(manifest.digest, read_config(document.get("config")), image_platform, layers)


def _no_image(subject: str, platform: Platform, available: str) -> NotFound:
    return NotFound(
        f"{subject} has no image for {platform}",
        reason=f"it has: {available or 'none'}",
        hint="choose one with --platform; programs of another architecture do not run here without emulation",
    )
