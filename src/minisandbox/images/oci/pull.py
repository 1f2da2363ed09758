"""Pull container images into the store: unpack their layers, and turn their configurations into image records."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import TYPE_CHECKING

from minisandbox.errors import DiskFull, ImageRefused, InvalidValue, NotFound
from minisandbox.images.base import BaseEntry, write_base
from minisandbox.images.image import DEFAULT_PATH, Image, archived, image_of, is_reference, put_if_new
from minisandbox.images.oci import manifest as m
from minisandbox.images.oci.copies import MEDIA_TYPE, REPLACE, ImageCopy, parse_copy, take_copy
from minisandbox.images.oci.layout import DockerArchive, LayoutDirectory, OciLayout, open_archive
from minisandbox.images.oci.reference import archive_names, default_name, is_of, origin
from minisandbox.spec import Local, Remote, parse_reference
from minisandbox.store import ImageRecord, LayerRecord, Lease, Made, Store, step_key
from minisandbox.store.blobs.lower_layers import LowerLayers
from minisandbox.store.blobs.streams import LayerStream
from minisandbox.store.blobs.unpack import Unpacked, unpack
from minisandbox.store.catalogue import NAMES
from minisandbox.store.disk.faults import store_faults
from minisandbox.values import JSONValue, human_size

if TYPE_CHECKING:
    from minisandbox.images.oci.registry import Registry

    Source = Registry | OciLayout | DockerArchive

KIND = "container layer"
"""The ``kind`` of the step that unpacks a layer of a container image."""
PULLED = "pulled"
"""Name of the layer fact that identifies the pulled blob: compression, digest, size, host and repository."""
LOST = "not as in the image"
"""Name of the note about file properties that could not be kept."""
_SEPARATOR = "\n"
JOBS = 3
"""The default number of images to pull in parallel. Each pull also fetches several blobs in parallel."""
STANDARD = Path("-")
"""The path that means standard input or output."""
_MOUNT_POINTS = (("dev", 0o755), ("etc", 0o755), ("proc", 0o555), ("run", 0o755), ("sys", 0o555), ("tmp", 0o1777))
_LINKS = {"hosts": "../run/hosts", "mtab": "../proc/self/mounts", "resolv.conf": "../run/resolv.conf"}

Tell = Callable[[str], None]
"""A callback for progress messages, which are shown to users."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A layer of a container image, and the layer of the store that it is unpacked to.

    Attributes:
        layer: the layer of the container image.
        definition: all inputs of the store's layer, which its key is derived from.
        key: the key of the store's layer.
    """

    layer: m.Layer
    definition: Mapping[str, str]
    key: str


def pull(
    reference: str,
    *,
    store: Store,
    name: str | None = None,
    platform: str | None = None,
    private: bool = False,
    progress: Tell | None = None,
) -> Image:
    """Pull a container image into the store.

    Layers that the store already has are neither fetched nor unpacked. An interrupted pull resumes.

    Args:
        reference: ``NAME[:TAG][@DIGEST]`` of a registry, ``oci:DIRECTORY[:TAG]``, ``oci-archive:FILE[:TAG]`` or
            ``docker-archive:FILE[:TAG]``.
        store: the store that receives the image.
        name: the image's name in the store. The default is derived from the reference: ``python-3.12`` for
            ``python:3.12``, and ``python-3.12-arm64`` if the platform is not that of this machine.
        platform: the platform, for example ``linux/arm64``; by default that of this machine.
        private: whether the image may be a private copy from another store (:mod:`.copies`), whose records are trusted.
        progress: called for each layer.

    Returns:
        The image.

    Raises:
        InvalidValue: the reference, the name or the platform is malformed, or another image has the default name.
        NotFound: the image does not exist, or does not support the platform.
        RegistryError: a request to the registry failed.
        ImageRefused: the image is malformed or hostile.
        DiskFull: the image does not fit, or the disk is full; finished layers are kept.
    """
    parsed, target = parse_reference(reference), m.platform_or_own(platform)
    report, image_name = progress or (lambda _: None), name
    if name is None and not private:
        image_name = name_of(reference, target)
        refuse_other(store, image_name, parsed)
    with _source(parsed, store, report) as source:
        return take(store, source, parsed, image_name, target, private=private, replace=name is not None, report=report)


def take(
    store: Store,
    source: Source,
    reference: Remote | Local,
    name: str | None,
    platform: m.Platform,
    *,
    private: bool,
    replace: bool,
    report: Tell,
) -> Image:
    """Copy an image from a registry, layout or archive into the store; see :func:`pull`.

    Args:
        store: the store that receives the image.
        source: the source of the image.
        reference: the reference to note in the image's record.
        name: the image's name; None for the default name or, in a private copy, the recorded name.
        platform: the requested platform.
        private: whether the image may be a private copy.
        replace: whether a private copy may replace another image.
        report: called for each layer.
    """
    try:
        manifest = source.manifest(platform)
        if manifest.kind == MEDIA_TYPE:
            return _take_copy(store, source, manifest, name, private=private, replace=replace, report=report)
        image = m.container(manifest, source.name, platform)
        notes = {"reference": str(reference), "digest": image.digest, "platform": str(image.platform)}
        if names := archive_names(manifest.names):
            notes[NAMES] = names
        return _Pull(store, source, image, report).run(name or name_of(str(reference), platform), notes)
    except ImageRefused as error:
        raise error.about(source.name)  # noqa: B904 - it is the same error


def _take_copy(
    store: Store, source: Source, manifest: m.Manifest, name: str | None, *, private: bool, replace: bool, report: Tell
) -> Image:
    if not private:
        raise InvalidValue(
            f"{source.name} is a private copy of an image",
            reason="later builds would use its layers by the keys that it claims",
            hint="take it with --private if you trust its author",
        )
    copy = parse_copy(manifest.config, f"the records of {source.name}")
    if name is not None:
        copy = replace_fields(copy, image=replace_fields(copy.image, name=name))
    layers = {step.key: step.layer for step in copied_layers(copy, manifest, source.name)}
    missing = [layer for key, layer in layers.items() if not store.has_layer(key)]
    require_space(store, missing, f"take {source.name}")
    source.prefetch(missing)
    for record in take_copy(
        store, copy, lambda layer: source.layer(layers[layer.record.key]), replace=replace, report=report
    ):
        source.published(layers[record.key])
    return image_of(store.image(copy.image.name), store)


def copied_layers(copy: ImageCopy, manifest: m.Manifest, name: str) -> list[LayerStep]:
    """Return the layers of a private copy.

    Raises:
        ImageRefused: the records and the manifest have different numbers of layers.
    """
    if len(copy.layers) != len(manifest.blobs):
        raise m.malformed(name, f"it has {len(manifest.blobs)} layers, its records {len(copy.layers)}")
    pairs = zip((layer.record.key for layer in copy.layers), manifest.blobs, strict=True)
    return [LayerStep(m.Layer(key, blob), {}, key) for key, blob in pairs]


def name_of(reference: str, platform: m.Platform) -> str:
    """Return an image's default name in the store.

    Raises:
        InvalidValue: the reference is malformed.
    """
    name = default_name(reference)
    if platform.fits(m.own_platform()):
        return name
    usual = m.Platform(platform.os, platform.architecture).usual
    return "-".join(filter(None, (name, platform.architecture, platform.variant.removeprefix(usual))))


def stored(store: Store, reference: str, platform: str = "") -> Image | None:
    """Return the image that the store has for a reference; None if the image must be pulled.

    Args:
        store: the store.
        reference: a reference as for :func:`pull`, a reference from an imported archive, or the name of a built image.
        platform: the platform, for example ``linux/arm64``; "" for that of this machine.

    Raises:
        InvalidValue: the reference or the platform is malformed.
        StoreError: a record is damaged.
    """
    target, name = m.platform_or_own(platform), reference.removesuffix(":latest")

    def records() -> Iterator[ImageRecord]:
        if not is_reference(name):
            with suppress(NotFound):
                yield store.image(name)
        parsed = parse_reference(reference)
        with suppress(NotFound):
            record = store.image(name_of(reference, target))
            if isinstance(parsed, Remote) and is_of(parsed, record.notes):  # a local file may have changed since
                yield record
        yield from archived(store, reference)

    for record in records():
        if target.fits(m.parse_platform(record.notes.get("platform", str(target)))):
            return image_of(record, store)
    return None


def refuse_other(store: Store, name: str, reference: Remote | Local, hint: str = "") -> None:
    """Raise an error if a pull would replace an image of another reference; a newer image of the same tag is fine.

    Raises:
        InvalidValue: the name belongs to an image of another reference.
    """
    if isinstance(reference, Remote) and reference.tag:
        reference = replace_fields(reference, digest="")
    with suppress(NotFound):
        notes = store.image(name).notes
        if not is_of(reference, notes):
            raise InvalidValue(
                f"{reference} would replace the image {name}",
                reason=origin(notes),
                hint=hint or f"choose another name with --name, or remove that image: minisandbox image rm {name}",
            )


def _source(reference: Remote | Local, store: Store, report: Tell) -> AbstractContextManager[Source]:
    if isinstance(reference, Remote):
        from minisandbox.images.oci.registry import open_registry  # noqa: PLC0415 - loads an HTTP client

        return open_registry(reference, store, report)
    return _opened(reference.path, store, reference.kind, reference.tag)


def steps_of(image: m.Container) -> list[LayerStep]:
    """Return the layers with their keys. A key depends on the layers below, because unpacking reads their files."""
    steps: list[LayerStep] = []
    for layer in image.layers:
        definition = {"kind": KIND, "diff_id": layer.diff_id, "owners": owner_mode()}
        steps.append(LayerStep(layer, definition, step_key(steps[-1].key if steps else None, definition)))
    return steps


def compressed_size(layers: Iterable[m.Layer]) -> int:
    """Return the total size of layers' blobs in bytes; a blob of unknown size counts as 0."""
    return sum(max(layer.blob.size, 0) for layer in layers)


def require_space(store: Store, layers: Collection[m.Layer], action: str) -> int:
    """Check that the store has space for the compressed layers; manifests do not state the unpacked sizes.

    Args:
        store: the store.
        layers: the layers to fetch.
        action: the action in the error, for example ``"pull 3 images"``.

    Returns:
        The free bytes.

    Raises:
        DiskFull: there is too little space.
    """
    disk, needed = os.statvfs(store.root), compressed_size(layers)
    free = disk.f_bavail * disk.f_frsize
    if needed > free:
        raise DiskFull(
            f"cannot {action}: the layers do not fit into the store {store.root}",
            reason=f"needed: {human_size(needed)} compressed, more once unpacked; available: {human_size(free)}",
            hint="free space with `minisandbox image gc --budget SIZE`, choose fewer images (--only), or set "
            "MINISANDBOX_STORE to a larger local disk",
        )
    return free


@dataclass(frozen=True, slots=True)
class _Layers:
    """The layers of a pull, on which two threads work.

    Attributes:
        steps: the layers, lowest first.
        hold: the lease to add them to.
        unpacked: an event for each layer, set when it is unpacked or has failed.
        given_up: set when the pull has failed or is interrupted.
        records: the layers' records, or errors.
    """

    steps: Sequence[LayerStep]
    hold: Lease
    unpacked: Sequence[threading.Event]
    given_up: threading.Event = field(default_factory=threading.Event)
    records: list[Future[LayerRecord]] = field(default_factory=list)

    def below(self, number: int) -> list[LayerRecord]:
        """Wait until the layers below a layer are published; return their records."""
        return [record.result() for record in self.records[:number]]


@dataclass(frozen=True, slots=True)
class _Pull:
    """The pull of one image from its source into the store."""

    store: Store
    source: Source
    image: m.Container
    report: Tell

    def run(self, name: str, notes: dict[str, str]) -> Image:
        with self.store.hold() as hold:
            steps = steps_of(self.image)
            missing = [step.layer for step in steps if not self.store.has_layer(step.key)]
            require_space(self.store, missing, f"pull {self.source.name}")
            self.source.prefetch(missing)
            layers = self._take_all(steps, hold)
            record = self._record(name, notes, layers, ensure_root(self.store, hold).key)
            return image_of(put_if_new(self.store, record), self.store)

    def _take_all(self, steps: Sequence[LayerStep], hold: Lease) -> list[LayerRecord]:
        """Unpack the missing layers one after the other. While a layer is unpacked, the one below is published."""
        layers = _Layers(steps, hold, [threading.Event() for _ in steps])
        with ThreadPoolExecutor(2, "layer") as pool:
            try:
                for number in range(len(steps)):
                    layers.records.append(pool.submit(self._take, number, layers))
                return layers.below(len(steps))
            except BaseException:  # also Ctrl-C: otherwise the pool would wait for downloads and layers
                layers.given_up.set()
                self.source.give_up()
                pool.shutdown(cancel_futures=True)
                raise

    def _take(self, number: int, layers: _Layers) -> LayerRecord:
        step, parent = layers.steps[number], layers.steps[number - 1].key if number else None

        def make(staging: Path) -> Made:
            if number:
                layers.unpacked[number - 1].wait()
            self.report(f"unpacking layer {number + 1} of {len(self.image.layers)}: {step.layer.diff_id[:19]}")
            made = self._unpacked(number, layers, staging)
            layers.unpacked[number].set()
            return made

        try:
            record, _ = self.store.ensure_layer(
                step.key, parent=parent, step=step.definition, make=make, hold=layers.hold
            )
        finally:
            layers.unpacked[number].set()
        self.source.published(step.layer)
        return record

    def _unpacked(self, number: int, layers: _Layers, staging: Path) -> Made:
        def below() -> LowerLayers:
            visible = _visible(layers.below(number))
            return LowerLayers(tuple(self.store.layer_tree(record.key) for record in reversed(visible)))

        layer = layers.steps[number].layer
        with self.source.layer(layer) as blob, LayerStream(blob, m.MOST_LAYER, layer.diff_id) as stream:
            blob.given_up = layers.given_up
            unpacked = unpack(stream, staging / "tree", below, keep_owners=keeps_owners())
            if stream.diff_id != layer.diff_id:
                raise ImageRefused(
                    f"{blob.name} does not unpack to what its image says",
                    reason=f"the tar has {stream.diff_id}, the configuration says {layer.diff_id}",
                    hint="nothing of this layer was published; the image is damaged, or somebody replaced the layer",
                )
        facts, remote = _facts(unpacked), self.source.remote
        if remote is not None:  # so that a later push to the same registry can skip this blob
            kind = layer.blob.media_type.rpartition("+")[2].rpartition(".")[2]
            facts[PULLED] = f"{kind} {layer.blob.digest} {layer.blob.size} {remote.host} {remote.repository}"
        return Made(staging / "tree", facts=facts, digests=unpacked.digests, plain=unpacked.plain)

    def _record(self, name: str, notes: dict[str, str], layers: list[LayerRecord], top: str) -> ImageRecord:
        config = self.image.config
        environment = config.environment
        environment.setdefault("PATH", DEFAULT_PATH)
        keys = (*(layer.key for layer in _visible(layers)), top)
        lost = dict.fromkeys(line for layer in layers for line in layer.facts.get("lost", "").split(_SEPARATOR) if line)
        lost |= dict.fromkeys(config.notes)
        user = "" if set(config.user.split(":")) <= {"", "0", "root"} else config.user
        if user and not keeps_owners():  # all files belong to one user, so another user could not write to them
            lost[f"commands run as root, not as {user}"] = None
            user = ""
        if lost:
            notes[LOST] = "; ".join(lost)
        if user:
            notes["user"] = user
        identity: dict[str, JSONValue] = {
            "kind": "image", "layers": keys, "environment": environment, "config": config.fields,
        }  # fmt: skip
        return ImageRecord(
            name, step_key(None, identity), keys, tuple(environment.items()), config.workdir, None, "", time.time(),
            notes, own_root=True, user=user, config=config.fields,
        )  # fmt: skip


def _visible(layers: list[LayerRecord]) -> list[LayerRecord]:
    """Return the visible layers: the topmost layer that hides everything below it, and the layers above it."""
    bottom = max((index for index, layer in enumerate(layers) if "hides all" in layer.facts), default=0)
    return layers[bottom:]


def keeps_owners() -> bool:
    """Return whether unpacked files keep the image's owners; if not run as root, the current user owns all files."""
    return os.geteuid() == 0


def owner_mode() -> str:
    """Return whether files keep their owners, for keys of layers: ``kept``, or ``one`` if one user owns all files."""
    return "kept" if keeps_owners() else "one"


def _facts(unpacked: Unpacked) -> dict[str, str]:
    facts = {"lost": _SEPARATOR.join(sorted(unpacked.notes))} if unpacked.notes else {}
    return {**facts, "hides all": "yes"} if unpacked.hides_all else facts


def ensure_root(store: Store, hold: Lease | None = None) -> LayerRecord:
    """Return the top layer of all container images: mount points, and links from /etc to per-sandbox files in /run."""

    def make(staging: Path) -> Made:
        with store_faults("write the mount points"):
            write_base(_root_entries(), staging / "tree")
        return Made(staging / "tree")

    step = {"kind": "container root"}
    return store.ensure_layer(root_key(), parent=None, step=step, make=make, hold=hold)[0]


def _root_entries() -> tuple[BaseEntry, ...]:
    """Return the entries of the top layer: mount points, and links from /etc to per-sandbox files."""
    folders = (BaseEntry(path, stat.S_IFDIR | mode) for path, mode in _MOUNT_POINTS)
    links = (BaseEntry(f"etc/{name}", stat.S_IFLNK | 0o777, target.encode()) for name, target in _LINKS.items())
    return (*folders, *links)


def root_key() -> str:
    """Return the key of the top layer (:func:`ensure_root`)."""
    entries: list[JSONValue] = [f"{entry.path} {entry.mode:o} {entry.data.decode()}" for entry in _root_entries()]
    return step_key(None, {"kind": "container root", "entries": entries})


def import_images(
    path: Path,
    *,
    store: Store,
    name: str | None = None,
    platform: str | None = None,
    private: bool = False,
    replace: bool = False,
    progress: Tell | None = None,
) -> list[Image]:
    """Import every image of a layout or an archive.

    Layers that the store already has are not unpacked.

    Args:
        path: the directory or the file; ``-`` for standard input.
        store: the store that receives the images.
        name: the name, if there is only one image; the default is the image's tag or, in a private copy, the recorded
            name.
        platform: the platform, for example ``linux/arm64``; by default that of this machine.
        private: whether the images may be private copies from another store (:mod:`.copies`), whose records are
            trusted.
        replace: whether to replace images of the same names.
        progress: called for each layer.

    Raises:
        NotFound: the path does not exist, or has no image for the platform.
        InvalidValue: the store has another image of the same name.
        ImageRefused: an image is malformed or hostile.
        DiskFull: the image does not fit, or the disk is full; finished layers are kept.
    """
    target, report, images = m.platform_or_own(platform), progress or (lambda _: None), list[Image]()
    store.require_writable("import images")
    if (path / "version").is_file() and (path / "layers").is_dir():
        raise InvalidValue(
            f"{path} is a store", hint=f"export its images first: MINISANDBOX_STORE={path} minisandbox image export"
        )
    with _opened(path, store) as source:
        tags = source.tags()
        if name is not None and len(tags) != 1:
            raise InvalidValue(f"{path} has {len(tags)} images", hint="leave out --name")
        for tag in tags:
            reference = Local(source.kind, path.absolute(), tag)
            image_name = tag_name(tag, path) if name is None and not private else name
            if image_name is not None and not replace:
                refuse_other(store, image_name, reference, REPLACE)
            image = take(
                store, source.tagged(tag), reference, image_name, target, private=private, replace=replace,
                report=report,
            )  # fmt: skip
            images.append(image)
    return images


def tag_name(tag: str, path: Path) -> str:
    """Return the default name of an imported image: its tag without the prefix of engines, or else the file's name."""
    name = tag.removeprefix("localhost/").removesuffix(":latest")
    if not name:
        return default_name(f"oci:{path}")
    return default_name(name) if ":" in name else default_name(f"{name}:latest").removesuffix("-latest")


@contextmanager
def _opened(path: Path, store: Store, kind: str = "", tag: str = "") -> Iterator[OciLayout | DockerArchive]:
    """Open a layout or an archive; detect its kind if ``kind`` is empty."""
    if kind == "oci" or (not kind and path.is_dir()):
        yield OciLayout(LayoutDirectory(path), tag)
        return
    with store.staging("import") as staging:
        if path == STANDARD:
            path = staging / "input"
            with path.open("xb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        archive = open_archive(path, staging)
        # docker's archives may also have an index.json, but only manifest.json has full names
        is_docker = kind == "docker-archive" if kind else archive.has("manifest.json")
        yield (DockerArchive if is_docker else OciLayout)(archive, tag)
