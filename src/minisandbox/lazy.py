"""Import the public names of packages when they are first used (PEP 562), so that importing a package is fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class LazyModule:
    """A module that is imported when its first attribute is used.

    Args:
        name: the module's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        """Import the module, and return its attribute."""
        from importlib import import_module  # noqa: PLC0415 - needed only once a name is used

        return getattr(import_module(self._name), attribute)


def importer(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the function ``__getattr__`` of a package.

    Args:
        package: the package's name.
        modules: the module of each public name, relative to the package.

    Returns:
        A function that imports a name from its module; it raises AttributeError for other names.
    """

    def import_name(name: str) -> object:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module  # noqa: PLC0415 - needed only once a name is used

        return getattr(import_module(f".{module}", package), name)

    return import_name
