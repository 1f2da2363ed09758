"""Plan the build of an image: derive the cache key of every step of a recipe before any step runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar, cast

from minisandbox import spec as r
from minisandbox.errors import MiniSandboxError, RegistryError
from minisandbox.images.base import BaseEntry, base_entries, base_key, platform_key
from minisandbox.images.image import DEFAULT_PATH, HOST_VARIABLES, Image
from minisandbox.images.repair import manual_step, read_manual_layers
from minisandbox.images.runner import BuildStep
from minisandbox.lazy import LazyModule
from minisandbox.spec import Context, CopyFiles, Lock, RunCommand, Variables
from minisandbox.store import Store, step_key
from minisandbox.store.disk.faults import store_faults
from minisandbox.store.store import check_name
from minisandbox.values import JSONValue

if TYPE_CHECKING:
    from minisandbox.images import steps as build_steps
    from minisandbox.images.dockerfile.trees import ContextTree
    from minisandbox.images.progress import Progress
    from minisandbox.images.python import interpreters
    from minisandbox.images.python.interpreters import Interpreter
    from minisandbox.images.sources import localsource, mirrors
    from minisandbox.images.sources.localsource import SourceSnapshot
else:  # images of Dockerfiles need none of these
    build_steps = LazyModule("minisandbox.images.steps")
    interpreters = LazyModule("minisandbox.images.python.interpreters")
    localsource = LazyModule("minisandbox.images.sources.localsource")
    mirrors = LazyModule("minisandbox.images.sources.mirrors")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChainBase:
    """The base that a chain of steps starts from.

    Attributes:
        layers: the keys of the base's layers, bottom first.
        key: the key from which the key of the first step is derived.
        environment: the variables that all steps see.
        workdir: the initial directory of commands.
        user: the user of the image's commands; "" for root.
        own_root: whether the base has a complete root file system, so that the host's ``/usr`` is not mounted.
        config: the run configuration of a container image.
        notes: facts shown to users.
    """

    layers: tuple[str, ...]
    key: str
    environment: Variables = ()
    workdir: PurePosixPath = PurePosixPath("/")
    user: str = ""
    own_root: bool = False
    config: Mapping[str, JSONValue] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """The build steps of one image.

    Attributes:
        name: the image's name.
        base: the base, with the environment, workdir, user and configuration of the finished image.
        steps: the steps on top of the base, bottom first.
        side_steps: steps whose layers do not belong to the image: hidden tests, and stages that steps copy from.
        tests: the key of the layer of hidden tests, or None.
        content: a hash of all inputs of the image's content; it does not depend on how the content is split into
            layers.
        lock: the lock that the finished image must match, or None.
    """

    name: str
    base: ChainBase
    steps: tuple[BuildStep, ...]
    side_steps: tuple[BuildStep, ...] = ()
    tests: str | None = None
    content: str = ""
    lock: Lock | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        """The keys of the image's layers, bottom first."""
        return (*self.base.layers, *(step.key for step in self.steps))

    def all_steps(self) -> Iterator[BuildStep]:
        """Yield all steps in an order in which each step comes after its dependencies."""
        waiting = list(self.side_steps)
        pending = {step.key for step in (*self.steps, *waiting)}
        for step in self.steps:
            # Run side steps early: steps copy from other stages, and a missing hidden test should be reported soon.
            while ready := [side for side in waiting if pending.isdisjoint((*side.below, *side.needs))]:
                waiting.remove(ready[0])
                pending.discard(ready[0].key)
                yield ready[0]
            yield step
            pending.discard(step.key)
        yield from waiting


@dataclass(slots=True)
class Planner:
    """Plans images; interpreters, sources and bases that several images share are examined once. Not thread-safe.

    Attributes:
        store: the store for the layers.
        mirrors: a directory of git repositories that are tried before the network.
    """

    store: Store
    mirrors: Path | None = None
    _images: dict[r.OciBase, Image] = field(default_factory=dict)
    _failures: dict[r.OciBase, MiniSandboxError] = field(default_factory=dict)
    _results: dict[Hashable, object] = field(default_factory=dict)

    def _once(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Call a function once per key; return the cached result."""
        if key not in self._results:
            self._results[key] = compute()
        return cast("_T", self._results[key])

    def base(self) -> tuple[BaseEntry, ...]:
        """Return the entries of the base layer."""
        with store_faults("read the host's /etc"):
            return self._once("/etc", base_entries)

    def platform(self) -> str:
        """Return the platform's key, from which the key of the first step is derived."""
        with store_faults("read the host's os-release"):
            return self._once("os-release", platform_key)

    def interpreter(self, text: str) -> Interpreter:
        """Return the interpreter for a request.

        Raises:
            InterpreterNotFound: this machine has no such interpreter.
        """
        return self._once(("python", text), lambda: interpreters.find_interpreter(text))

    def snapshot(self, source: r.LocalSource) -> SourceSnapshot:
        """Return the files of a local source, listed and hashed once.

        Raises:
            SourceError: the source cannot be read.
            ProgramNotFound: the source lies in a git work tree, and there is no git.
        """
        return self._once(source, lambda: localsource.take_snapshot(source))

    def fetch(
        self,
        recipes: Iterable[r.Buildable],
        progress: Progress | None,
        on_remaining: Callable[[str], None] | None,
        note: Callable[[str], None],
    ) -> None:
        """Pull the missing container images of recipes in parallel; see :func:`.prefetch.pull_all`.

        If a pull fails, its error is raised later, by planning a recipe that needs the image.

        Raises:
            DiskFull: the images do not fit into the store.
        """
        from minisandbox.images.dockerfile.reading import base_images  # noqa: PLC0415 - loads a parser
        from minisandbox.images.oci.prefetch import pull_all  # noqa: PLC0415 - loads an HTTP client

        bases = [base for recipe in recipes for base in base_images(recipe)]
        if bases:
            pulled = pull_all(bases, store=self.store, progress=progress, on_remaining=on_remaining, note=note)
            self._images |= pulled.images
            self._failures |= pulled.failures

    def container(self, base: r.OciBase) -> Image:
        """Return a container image from the store, or pull it. A local archive is always read, because it may change.

        Raises:
            MiniSandboxError: the pull failed; see :func:`minisandbox.images.pull`.
        """
        from minisandbox.images.oci.pull import pull, stored  # noqa: PLC0415 - loads an HTTP client

        if base not in self._images:
            try:
                if base in self._failures:
                    raise self._failures[base]
                self._images[base] = stored(self.store, base.reference, base.platform) or pull(
                    base.reference, store=self.store, platform=base.platform or None
                )
            except RegistryError as error:
                raise error.about(base.reference)  # noqa: B904 - it is the same error
        return self._images[base]

    def plan(self, name: str, recipe: r.Buildable) -> ImagePlan:
        """Plan an image.

        Args:
            name: the image's name.
            recipe: its recipe.

        Raises:
            InvalidValue: the name is invalid.
            InterpreterNotFound: no interpreter of this machine satisfies the recipe.
            SourceError: a local source cannot be read.
            HostError: this machine cannot run a step.
            MiniSandboxError: the base cannot be pulled or built.
        """
        check_name(name)
        plan = self.chain(name, recipe.recipe() if isinstance(recipe, r.PythonRecipe) else recipe).plan()
        return replace(plan, side_steps=tuple(self._needed_side_steps(plan)))

    def _needed_side_steps(self, plan: ImagePlan) -> Iterator[BuildStep]:
        """Return the side steps that a build needs: layers that already exist do not need their side steps."""
        by_key = {step.key: step for step in (*plan.side_steps, *plan.steps)}
        pending, needed = [*(step.key for step in plan.steps), *filter(None, [plan.tests])], set()
        while pending:
            key = pending.pop()
            if key in by_key and key not in needed:
                needed.add(key)
                if not self.store.has_layer(key):
                    pending += (*by_key[key].below, *by_key[key].needs)
        return (step for step in plan.side_steps if step.key in needed)

    def read(self, base: r.DockerfileBase) -> r.Recipe:
        """Read a Dockerfile as a recipe; pull its missing base images."""
        from minisandbox.images.dockerfile.reading import evaluated, options_of  # noqa: PLC0415 - loads a parser

        return evaluated(base.dockerfile, base.context, options_of(base), self.container)

    def files(self, context: Context) -> ContextTree:
        """Return the files of a Dockerfile's build context."""
        from minisandbox.images.dockerfile.trees import open_context  # noqa: PLC0415 - loads a parser

        return self._once(context, lambda: open_context(context.root, context.dockerfile))

    def chain(self, name: str, recipe: r.Recipe) -> Chain:
        """Return the chain of a recipe's steps on top of its base."""
        base = recipe.base
        if isinstance(base, r.DockerfileBase):
            base = r.StageBase(self.read(base))
        if isinstance(base, r.StageBase):
            chain = self.chain(name, base.recipe)
            chain.continue_with(recipe)
        else:
            manual_layers = read_manual_layers(self.store, name) if name else {}
            chain = Chain(self, name, self.chain_base(base), recipe, manual_layers)
        for step in recipe.steps:
            chain.add(step)
        return chain

    def stage(self, recipe: r.Recipe) -> Chain:
        """Return the chain of a stage that steps copy from; plan it only once, because planning hashes files."""
        return self._once(id(recipe), lambda: (recipe, self.chain("", recipe)))[1]

    def chain_base(self, base: r.HostBase | r.OciBase | r.ScratchBase) -> ChainBase:
        """Return the start of a chain of steps on top of a base."""
        if isinstance(base, r.HostBase):
            return ChainBase((base_key(self.base()),), self.platform(), HOST_VARIABLES)
        if isinstance(base, r.OciBase):
            image = self.container(base)
            definition: dict[str, JSONValue] = {
                "kind": "container", "layers": image.layers, "environment": dict(image.environment),
                "user": image.user, "workdir": str(image.workdir),
            }  # fmt: skip
            notes = {name: note for name, note in image.notes.items() if name not in ("reference", "digest", "names")}
            notes["base"] = image.notes.get("reference", image.name)
            return ChainBase(
                image.layers, step_key(None, definition), image.environment, image.workdir, image.user, True,
                image.config, notes,
            )  # fmt: skip
        from minisandbox.images.oci.pull import ensure_root  # noqa: PLC0415 - loads an HTTP client

        key = ensure_root(self.store).key
        return ChainBase((key,), step_key(None, {"kind": "scratch"}), (("PATH", DEFAULT_PATH),), own_root=True)

    def described(self, source: r.Source, key: str) -> str:
        """Return the output of ``git describe`` for a source's commit, or "".

        Args:
            source: the source; only a git source has a description.
            key: the key of the source's layer, whose record has the description. If the layer does not exist, read
                the local repositories.
        """
        if not isinstance(source, r.GitSource):
            return ""
        if self.store.has_layer(key):
            return self.store.layer(key).facts.get(build_steps.DESCRIBED, "")
        return mirrors.Mirrors(self.store, self.mirrors).describe(source)


@dataclass(slots=True)
class Chain:
    """A chain of steps on top of a base, extended step by step."""

    planner: Planner
    name: str
    base: ChainBase
    recipe: r.Recipe
    manual_layers: Mapping[str, str]
    steps: list[BuildStep] = field(default_factory=list)
    side_steps: list[BuildStep] = field(default_factory=list)
    environment: dict[str, str] = field(init=False)
    tests: str | None = None
    interpreter: Interpreter | None = None
    source: r.Source | None = None
    source_step: BuildStep | None = None
    key: str = field(init=False)  # the next step's key is derived from this key

    def __post_init__(self) -> None:
        self.key = self.base.key
        self.environment = dict(self.base.environment)
        self._add_manual_layer()

    @property
    def store(self) -> Store:
        """The store of the layers."""
        return self.planner.store

    def files(self, context: Context) -> ContextTree:
        """Return the files of a Dockerfile's build context."""
        return self.planner.files(context)

    @property
    def layers(self) -> tuple[str, ...]:
        """The keys of the layers so far, bottom first."""
        return (*self.base.layers, *(step.key for step in self.steps))

    @property
    def variables(self) -> Variables:
        """The variables of the next step."""
        return tuple(sorted(self.environment.items()))

    @property
    def workdir(self) -> PurePosixPath:
        """The initial directory of commands."""
        return self.recipe.workdir or self.base.workdir

    def continue_with(self, recipe: r.Recipe) -> None:
        """Continue the chain with a recipe that is based on the current recipe."""
        self.environment |= dict(self.recipe.environment)
        self.base = replace(
            self.base,
            workdir=self.workdir,
            user=self.base.user if self.recipe.user is None else self.recipe.user,
            config={**self.base.config, **self.recipe.config},
        )
        self.recipe = recipe

    def plan(self) -> ImagePlan:
        """Return the finished plan of the image."""
        self.continue_with(self.recipe)
        base = replace(self.base, environment=self.variables)
        steps, side_steps = tuple(self.steps), tuple(self.side_steps)
        return ImagePlan(self.name, base, steps, side_steps, self.tests, self.key, self.recipe.lock)

    def add(self, step: r.Step) -> None:
        """Add a step of the recipe."""
        workdir = self.workdir
        match step:
            case RunCommand() | CopyFiles():
                from minisandbox.images.dockerfile.planning import plan_step  # noqa: PLC0415 - loads a parser

                self._add(plan_step(step, self))
            case r.Run():
                run_step = self._placed(build_steps.command_step(step, workdir))
                self._append(replace(run_step, user=step.user, workdir=step.workdir or workdir))
            case r.InstallSystem() | r.InstallAgent():
                self._add(self._program_step(step))
            case r.InstallPython():
                self.interpreter = self.planner.interpreter(step.python)
                self.environment |= _python_variables()
                self._add(build_steps.python_step(step, self.interpreter))
            case r.InstallRequirements():
                assert self.interpreter is not None
                self._add(build_steps.requirements_step(step, self.interpreter))
            case r.CheckOut():
                self._check_out(step.source)
            case r.Install():
                self._install(step)
            case r.HiddenTests():
                self.side_steps.append(self._placed(build_steps.tests_step(step, workdir)))
                self.tests = self.side_steps[-1].key
            case r.CutHistory():
                self._cut(step)

    def _program_step(self, step: r.InstallSystem | r.InstallAgent) -> BuildStep:
        if isinstance(step, r.InstallSystem):
            return build_steps.system_step(step)
        return build_steps.agent_step(step, self.planner.interpreter(build_steps.AGENT_PYTHON))

    def origin(self, base: r.OciBase | r.StageBase) -> tuple[str, tuple[str, ...]]:
        """Plan an image or stage to copy from, and add its steps as side steps; return its key and layers."""
        if isinstance(base, r.OciBase):
            chain_base = self.planner.chain_base(base)
            return chain_base.key, chain_base.layers
        stage = self.planner.stage(base.recipe)
        keys = {step.key for step in (*self.side_steps, *self.steps)}
        self.side_steps += [step for step in (*stage.side_steps, *stage.steps) if step.key not in keys]
        return stage.key, stage.layers

    def _check_out(self, source: r.Source) -> None:
        self.source = source
        if isinstance(source, r.ImageSource):
            if source.commit or source.remove:
                self._add(build_steps.image_source_step(source, self.workdir))
        else:
            self.source_step = self._add_shared(self._source(source))

    def _cut(self, step: r.CutHistory) -> None:
        """Add the steps that turn the source's files, or the image's repository, into a single commit."""
        if isinstance(self.source, r.ImageSource):
            self._add(build_steps.image_task_step(step, self.source.commit, self.workdir))
            return
        assert self.source_step is not None
        store, key = self.store, self.source_step.key
        self._add_shared(build_steps.repository_step(self.workdir), self.source_step)
        self._add(build_steps.task_step(step, lambda: store.layer_tree(key), self.workdir))

    def _install(self, step: r.Install) -> None:
        assert self.source is not None
        assert self.source_step is not None
        if self.base.own_root:
            for install_step in build_steps.plain_install_steps(step, self.workdir):
                self._add(install_step)
            return
        described = self.planner.described(self.source, self.source_step.key)
        self._add(build_steps.install_step(step, self.interpreter, described, self.workdir))

    def _source(self, source: r.SdistSource | r.GitSource | r.LocalSource) -> BuildStep:
        if isinstance(source, r.LocalSource):
            return build_steps.local_step(source, self.planner.snapshot(source), self.workdir)
        if isinstance(source, r.SdistSource):
            return build_steps.sdist_step(source, self.store, self.workdir)
        repositories = mirrors.Mirrors(self.store, self.planner.mirrors)
        return build_steps.git_step(source, repositories, self.recipe.step_timeout, self.workdir)

    def _add(self, step: BuildStep) -> None:
        """Add a step on top of the chain."""
        self._append(self._placed(step))

    def _add_shared(self, step: BuildStep, parent: BuildStep | None = None) -> BuildStep:
        """Add a step whose layer depends only on ``parent``, not on the rest of the chain, so that images share it."""
        below = () if parent is None else (*parent.below, parent.key)
        key = step_key(parent.key if parent else None, step.definition)
        shared_step = replace(self._placed(step), key=key, below=below)
        self._append(shared_step, step_key(self.key, step.definition))
        return shared_step

    def _append(self, step: BuildStep, chain_key: str = "") -> None:
        self.steps.append(step)
        self.key = chain_key or step.key
        self._add_manual_layer()

    def _add_manual_layer(self) -> None:
        """Add the layer that a user created by hand on top of the last step, if there is such a layer."""
        if (layer := self.manual_layers.get(self.layers[-1])) is not None:
            self._append(replace(self._placed(manual_step(self.name, layer)), key=layer))

    def _placed(self, step: BuildStep) -> BuildStep:
        """Return a step with the key and settings for its position on top of the chain, without adding the step."""
        return replace(
            step, key=step_key(self.key, step.definition), below=self.layers, environment=self.variables,
            timeout=self.recipe.step_timeout, own_root=self.base.own_root, workdir=self.workdir,
        )  # fmt: skip


def _python_variables() -> Mapping[str, str]:
    """Return the variables that activate the Python environment in all later steps."""
    return {
        "PATH": f"{build_steps.ENVIRONMENT}/bin:{DEFAULT_PATH}",
        "CONDA_PREFIX": build_steps.ENVIRONMENT,
        "CONDA_DEFAULT_ENV": build_steps.ENVIRONMENT.rpartition("/")[2],
    }
