"""Build a Dockerfile: its stages as layers of the store, each made once."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from minisandbox.errors import BuildError, InvalidValue, NotFound, UnfitTree
from minisandbox.images.dockerfile.copying import copy_layer
from minisandbox.images.dockerfile.evaluation import Config, Wanted, evaluate
from minisandbox.images.dockerfile.parsing import parse_dockerfile
from minisandbox.images.dockerfile.running import Bind, RunPlace, named_user, run_layer
from minisandbox.images.dockerfile.sources import Source, content_digest, definition, list_sources
from minisandbox.images.dockerfile.stages import Context, CopyFiles, ImageBase, Mount, RunCommand, Scratch, Stage
from minisandbox.images.dockerfile.trees import ContextTree, LayersTree, Tree, open_context
from minisandbox.images.image import DEFAULT_PATH, Image, image_of, load_image, put_if_new
from minisandbox.images.oci.below import Below
from minisandbox.images.oci.pull import ensure_root, keeps_owners, pull
from minisandbox.images.progress import BuildEvent, Progress, StepState
from minisandbox.sandbox.cancellation import Cancellation
from minisandbox.store import ImageRecord, LayerRecord, Made, Store, step_key
from minisandbox.store.faults import store_faults
from minisandbox.store.keys import JSONValue
from minisandbox.store.store import check_name
from minisandbox.types import Network

TIMEOUT = 7200.0
"""Seconds that one RUN may take."""
_MOST_DOCKERFILE = 4 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """How a Dockerfile is built.

    Attributes:
        arguments: values of its ``ARG``s (``--build-arg``).
        target: the stage; None for the last one.
        platform: such as ``linux/arm64``; "" for this machine's.
        network: what a RUN reaches that does not say otherwise.
        secrets: contents of secrets by id.
        timeout: seconds that one RUN may take.
        memory: bytes that one RUN may hold; None: no limit.
        jobs: steps that run at once.
        pull: whether base images are pulled even if they are there.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    platform: str = ""
    network: Network = field(default_factory=Network.host)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    timeout: float = TIMEOUT
    memory: int | None = None
    jobs: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    pull: bool = False


def build_dockerfile(
    dockerfile: Path,
    context: Path,
    *,
    store: Store,
    name: str,
    options: Options | None = None,
    progress: Progress | None = None,
    cancellation: Cancellation | None = None,
) -> Image:
    """Build a Dockerfile, or find what it comes to: every layer that is in the store is used as it is.

    Args:
        dockerfile: its path.
        context: the directory that COPY and ADD take files from.
        store: where the layers go.
        name: what the image is called; an earlier image of that name is replaced.
        options: how it is built.
        progress: told of each step as it starts and ends, by several threads.
        cancellation: calls the building off, from another thread.

    Returns:
        The image.

    Raises:
        DockerfileError: the Dockerfile is wrong or wants what is unsupported; the error names the line.
        BuildError: a RUN failed; nothing of it was published, its log is kept.
        NotFound: a base image does not exist.
        RegistryError: a registry does not deliver a base image.
        ImageRefused: a base image or an archive is malformed or hostile.
        DiskFull: the disk is full; finished layers are kept.
        SandboxCreationError: this machine cannot make a sandbox.
    """
    check_name(name)
    options = options or Options()
    files = open_context(context.resolve(), dockerfile)
    parsed = parse_dockerfile(_read(dockerfile))
    bases = _Bases(store, options.pull)
    wanted = Wanted(options.target, options.arguments, options.platform)
    stage = evaluate(parsed, wanted, bases.config)
    build = _Build(store, name, options, files, bases, progress, cancellation or Cancellation())
    chain = build.plan(stage)
    with store.hold(*chain.base):
        build.run(chain)
        return _record(store, name, stage, chain, dockerfile)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_DOCKERFILE + 1)
    except OSError as error:
        raise InvalidValue(f"the Dockerfile {path} cannot be read", reason=error.strerror) from None
    if len(data) > _MOST_DOCKERFILE:
        raise InvalidValue(f"{path} has more than {_MOST_DOCKERFILE} bytes", hint="is it a Dockerfile?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{path} is not UTF-8", reason=str(error), hint="is it a Dockerfile?") from None


@dataclass(slots=True)
class _Bases:
    """The images that stages start from."""

    store: Store
    pull: bool
    found: dict[ImageBase, Image] = field(default_factory=dict)

    def image(self, base: ImageBase) -> Image:
        """Return an image, pulled if it is not there."""
        if base not in self.found:
            self.found[base] = self._found(base)
        return self.found[base]

    def config(self, base: ImageBase) -> Config:
        """Return the configuration of an image."""
        image = self.image(base)
        rows = [f"{name}={value}" for name, value in image.environment]
        return {**image.config, "Env": rows, "WorkingDir": str(image.workdir)}

    def _found(self, base: ImageBase) -> Image:
        if not self.pull:
            try:
                image = load_image(self.store, base.reference.removesuffix(":latest"))
            except (NotFound, InvalidValue):
                pass
            else:
                if not image.own_root:
                    raise InvalidValue(
                        f"FROM {base.reference} cannot be built on",
                        reason="that image shows the host's /usr, and is no container image",
                        hint="start from a container image",
                    )
                return image
        return pull(base.reference, store=self.store, platform=base.platform or None)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The layers of a stage.

    Attributes:
        base: keys of the layers that are there already.
        layers: keys of all its layers, bottom first.
        known: what the key of the next layer depends on.
    """

    base: tuple[str, ...]
    layers: tuple[str, ...]
    known: str


@dataclass(slots=True)
class _Planned:
    """A layer to be made.

    Attributes:
        key: its key.
        below: keys of the layers below, bottom first.
        needs: keys of layers that it reads, those below among them.
        definition: what makes it.
        step: the instruction.
        make: makes it in a staging directory.
    """

    key: str
    below: tuple[str, ...]
    needs: frozenset[str]
    definition: Mapping[str, JSONValue]
    step: RunCommand | CopyFiles
    make: Callable[[Path], Made]


class _Build:
    """One build: plans stages, and makes what is missing."""

    def __init__(
        self,
        store: Store,
        name: str,
        options: Options,
        files: ContextTree,
        bases: _Bases,
        progress: Progress | None,
        cancellation: Cancellation,
    ) -> None:
        self._store, self._name, self._options = store, name, options
        self._files, self._bases = files, bases
        self._progress, self._cancellation = progress, cancellation
        self._owners = "kept" if keeps_owners() else "one"
        self._chains: dict[int, _Chain] = {}
        self._planned: dict[str, _Planned] = {}
        self._news = threading.Lock()

    # --- plan ---

    def plan(self, stage: Stage) -> _Chain:
        """Plan a stage and what it needs, once."""
        if id(stage) not in self._chains:
            self._chains[id(stage)] = self._plan(stage)
        return self._chains[id(stage)]

    def _plan(self, stage: Stage) -> _Chain:
        chain = self._origin(stage.base)
        layers, known = chain.layers, chain.known
        for step in stage.steps:
            planned = self._step(step, layers, known)
            layers, known = (*layers, planned.key), planned.key
        return _Chain(chain.base, layers, known)

    def _origin(self, origin: ImageBase | Scratch | Stage) -> _Chain:
        """The layers of what a stage starts from, or of what is copied from."""
        if isinstance(origin, Stage):
            return self.plan(origin)
        if isinstance(origin, Scratch):
            layers: tuple[str, ...] = (ensure_root(self._store).key,)
        else:
            layers = self._bases.image(origin).layers
        return _Chain(layers, layers, step_key(None, {"kind": "container", "layers": list(layers)}))

    def _step(self, step: RunCommand | CopyFiles, below: tuple[str, ...], known: str) -> _Planned:
        planned = self._copy(step, below, known) if isinstance(step, CopyFiles) else self._run(step, below, known)
        return self._planned.setdefault(planned.key, planned)

    def _copy(self, copy: CopyFiles, below: tuple[str, ...], known: str) -> _Planned:
        made_of, needs, read = self._read_origin(copy)
        values = {**definition(copy, made_of), "owners": self._owners}

        def make(staging: Path) -> Made:
            sources, tree = read()
            done = copy_layer(
                copy, sources, tree, staging / "tree", self._below(below), keep_owners=self._owners == "kept"
            )
            return Made(staging / "tree", digests=done.digests)

        return _Planned(step_key(known, values), below, frozenset((*below, *needs)), values, copy, make)

    def _read_origin(
        self, copy: CopyFiles
    ) -> tuple[str, tuple[str, ...], Callable[[], tuple[tuple[Source, ...], Tree]]]:
        """What a COPY's sources hash to, the layers that they lie in, and what reads them once those are there."""
        if isinstance(copy.origin, Context):
            found = list_sources(copy, self._files)
            return content_digest(found, self._files), (), lambda: (found, self._files)
        chain = self._origin(copy.origin)

        def read() -> tuple[tuple[Source, ...], Tree]:
            tree = LayersTree(self._below(chain.layers))
            return list_sources(copy, tree), tree

        return chain.known, chain.layers, read

    def _run(self, run: RunCommand, below: tuple[str, ...], known: str) -> _Planned:
        binds = {mount: self._bind(run, mount) for mount in run.mounts if mount.wanted.kind == "bind"}
        origins = {mount: self._read_origin(copy) for mount, copy in binds.items()}
        values: dict[str, JSONValue] = {
            "kind": "run",
            "argv": list(run.argv),
            "variables": [list(row) for row in run.variables],
            "workdir": run.workdir,
            "user": run.user,
            "network": run.network,
            "script": "" if run.script is None else hashlib.sha256(run.script.content).hexdigest(),
            "mounts": [[repr(mount.wanted), origins[mount][0] if mount in origins else ""] for mount in run.mounts],
            "owners": self._owners,
        }
        needs = frozenset((*below, *(key for _, keys, _ in origins.values() for key in keys)))

        def make(staging: Path) -> Made:
            read = {mount: Bind(binds[mount], *origins[mount][2]()) for mount in binds}
            return run_layer(run, self._place(below, staging, key, read))

        key = step_key(known, values)
        return _Planned(key, below, needs, values, run, make)

    def _bind(self, run: RunCommand, mount: Mount) -> CopyFiles:
        """A bind as the COPY that shows it."""
        source = mount.wanted.source or "."
        return CopyFiles(run.line, run.text, mount.origin, (source,), (), "/m")

    def _place(self, below: tuple[str, ...], staging: Path, key: str, binds: Mapping[Mount, Bind]) -> RunPlace:
        options = self._options
        return RunPlace(
            self._name, tuple(map(self._store.layer_tree, below)), staging, self._store.root / "caches",
            self._store.log_path(key), options.timeout, options.network, options.secrets, binds, options.memory,
            self._owners == "kept", self._cancellation,
        )  # fmt: skip

    def _below(self, layers: tuple[str, ...]) -> Below:
        return Below(tuple(map(self._store.layer_tree, reversed(layers))))

    # --- make ---

    def run(self, chain: _Chain) -> None:
        """Make what a chain lacks; what does not depend on each other at the same time."""
        waiting = self._wanted(chain)
        running: dict[Future[None], str] = {}
        with ThreadPoolExecutor(max(1, self._options.jobs), "dockerfile") as pool:
            try:
                while waiting or running:
                    for key in [key for key, one in waiting.items() if not one.needs & self._unmade(waiting, running)]:
                        running[pool.submit(self._make, waiting.pop(key))] = key
                    done, _ = wait(running, timeout=1.0, return_when=FIRST_COMPLETED)
                    for future in done:
                        del running[future]
                        future.result()
            except BaseException:  # a failure or Ctrl-C: what runs is ended before the caller goes on
                self._cancellation.cancel()
                raise

    def _wanted(self, chain: _Chain) -> dict[str, _Planned]:
        """The layers of a chain, and those that have to be there to make what is missing."""
        wanted: dict[str, _Planned] = {}
        ahead = list(chain.layers)
        while ahead:
            key = ahead.pop()
            planned = self._planned.get(key)
            if planned is not None and key not in wanted:
                wanted[key] = planned
                if not self._store.has_layer(key):
                    ahead += planned.needs
        return wanted

    def _unmade(self, waiting: Mapping[str, _Planned], running: Mapping[Future[None], str]) -> set[str]:
        return {*waiting, *running.values()}

    def _make(self, planned: _Planned) -> None:
        def make(staging: Path) -> Made:
            self._cancellation.check()
            self._tell(planned, StepState.STARTED)
            with self._store.hold(*planned.needs), store_faults(f"build line {planned.step.line}"):
                return planned.make(staging)

        try:
            record, made = self._store.ensure_layer(
                planned.key,
                parent=planned.below[-1],
                step=planned.definition,
                make=make,
                on_wait=lambda: self._tell(planned, StepState.WAITING),
                beside=planned.below,
            )
        except UnfitTree as error:
            raise BuildError(
                f"what line {planned.step.line} of {self._name!r} wrote cannot be kept: {error.what}",
                step=f"line {planned.step.line}",
                reason=error.reason,
                hint=error.hint,
            ) from error
        self._tell(planned, StepState.FINISHED if made else StepState.CACHED, record)

    def _tell(self, planned: _Planned, state: StepState, record: LayerRecord | None = None) -> None:
        if self._progress is None:
            return
        seconds, size = (record.seconds, record.bytes) if record is not None else (0.0, 0)
        step, text = f"line {planned.step.line}", planned.step.text.splitlines()[0][:100]
        with self._news:
            self._progress(BuildEvent(self._name, step, state, planned.key, seconds, size, text))


def _record(store: Store, name: str, stage: Stage, chain: _Chain, dockerfile: Path) -> Image:
    """Record the image of a stage."""
    config = stage.config
    environment = {row.partition("=")[0]: row.partition("=")[2] for row in _texts(config.get("Env"))}
    environment.setdefault("PATH", DEFAULT_PATH)
    user = named_user(str(config.get("User") or "")) or ""
    notes = {"dockerfile": str(dockerfile)}
    if user and not keeps_owners():
        notes["not as in the image"] = f"commands run as root, not as {user}; all files belong to root"
        user = ""
    identity: dict[str, JSONValue] = {"kind": "image", "layers": list(chain.layers), "config": config}
    record = ImageRecord(
        name=name,
        key=step_key(None, identity),
        layers=chain.layers,
        environment=tuple(environment.items()),
        workdir=str(config.get("WorkingDir") or "/"),
        tests_layer=None,
        base_commit="",
        created=time.time(),
        notes=notes,
        own_root=True,
        user=user,
        config=config,
    )
    return image_of(put_if_new(store, record), store)


def _texts(value: JSONValue) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()
