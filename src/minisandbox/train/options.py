"""Read configurations, which are frozen dataclasses, from a YAML file and ``key=value`` arguments.

A field completely defines an option. The field's type defines the accepted values, its default the value if the option
is omitted, and its ``help`` the documentation. A field whose type is a dataclass is a section, with the keys
``section.key``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.tasks.formats.writing import written_whole

T = TypeVar("T")
Values = dict[str, object]


def option(
    default: T,
    *,
    help: str,  # noqa: A002 - named like the metadata key
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float = math.inf,
) -> T:
    """Return a dataclass field that defines an option.

    Args:
        default: the value if the option is omitted.
        help: a description for the documentation.
        choices: the allowed values; empty to allow any value.
        least: the least allowed number; None to allow all numbers above 0.
        most: the largest allowed number.
    """
    metadata = {"help": help, "choices": choices, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


def required(help: str) -> typing.Any:  # noqa: A002 - named like the metadata key
    """Return a dataclass field that defines a required option, as ``Any`` because the field may have any type.

    Args:
        help: a description for the documentation.
    """
    return dataclasses.field(metadata={"help": help})


class Options:
    """The base class of configurations, which checks their numbers and choices.

    Raises:
        InvalidValue: a value is not allowed; the message names the option.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(typing.cast("typing.Any", self)):
            value, limits = getattr(self, entry.name), entry.metadata
            choices, least, most, hint = limits.get("choices"), limits.get("least"), limits.get("most", math.inf), ""
            if choices:
                hint = "" if value in choices else f"give one of {', '.join(choices)}"
            elif isinstance(value, int | float) and not isinstance(value, bool):
                is_allowed = (value > 0 if least is None else value >= least) and value <= most
                expected = "a number above 0" if least is None else f"{least:g} or more"
                hint = "" if is_allowed else f"give {expected}{f', at most {most:g}' if most < math.inf else ''}"
            if hint:
                raise InvalidValue(f"{entry.name} is {value!r}", hint=hint)


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """The documentation of one option.

    Attributes:
        key: the option's name in files and on the command line.
        kind: the option's type in words.
        default: the default as YAML; empty if the option is required.
        help: the description.
    """

    key: str
    kind: str
    default: str
    help: str


# --- reading ---------------------------------------------------------------------------------------------------------


def load(kind: type[T], name: str, settings: Sequence[str] = ()) -> T:
    """Read a configuration.

    Args:
        kind: the configuration's dataclass.
        name: a YAML file, or the name of a packaged configuration.
        settings: ``key=value`` pairs with YAML values, which override the file.

    Raises:
        NotFound: there is no such file.
        InvalidValue: a key is unknown or missing, or a value is invalid. The message names the file and the nearest
            known key.
    """
    text, place = _text_of(name)
    values = _parsed(text, place) or {}
    if not isinstance(values, dict):
        raise InvalidValue(f"{place} is not a mapping", hint="write key: value")
    for setting in settings:
        _set(kind, values, setting)
    return from_mapping(kind, values, place=place)


def packaged() -> tuple[str, ...]:
    """Return the names of the packaged configurations."""
    directory = resources.files("minisandbox.train") / "configs"
    return tuple(sorted(file.name.removesuffix(".yaml") for file in directory.iterdir() if file.name.endswith(".yaml")))


def _text_of(name: str) -> tuple[str, str]:
    path = Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8"), name
    if name in packaged():
        file = resources.files("minisandbox.train") / "configs" / f"{name}.yaml"
        return file.read_text(encoding="utf-8"), f"{name} (packaged)"
    raise NotFound(f"{name}: no such file", hint=f"give a YAML file, or a packaged one: {', '.join(packaged())}")


def _parsed(text: str, what: str) -> object:
    import yaml  # noqa: PLC0415 - only configurations need yaml

    class Loader(yaml.SafeLoader):
        """A YAML loader that rejects duplicate keys, of which the standard loader would ignore all but the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [str(key.value) for key, _ in node.value]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise InvalidValue(f"{what}: the key {twice[0]} occurs twice", hint="remove one of them")
            return super().construct_mapping(node, deep)

    try:
        value: object = yaml.load(text, Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.YAMLError as error:
        raise InvalidValue(f"{what} is not valid YAML", reason=str(error), hint="correct that line") from error
    return value


def _set(kind: type, values: Values, setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals:
        raise InvalidValue(f"--set {setting}: no value", hint="write --set key=value")
    value = _parsed(text, f"--set {setting}: the value")
    table, section = values, kind
    *parents, last = key.split(".")
    for parent in parents:
        inner = _hints(section).get(parent)
        if inner is None:
            raise _unknown(f"--set {setting}", parent, section)
        if not _is_section(inner):
            raise InvalidValue(f"--set {setting}: {parent} is not a section", reason=f"it is {_kind(inner)}")
        section = typing.cast("type", inner)
        below = table.setdefault(parent, {})
        if not isinstance(below, dict):
            raise InvalidValue(
                f"--set {setting}: {parent} has the value {below!r} in the file, not a section",
                hint=f"write it as a section with the key {last}",
            )
        table = below
    if last not in _hints(section):
        raise _unknown(f"--set {setting}", last, section)
    table[last] = value


def from_mapping(kind: type[T], values: Mapping[str, object], *, place: str) -> T:
    """Convert a mapping to a configuration.

    Args:
        kind: the configuration's dataclass.
        values: the mapping.
        place: the mapping's name in error messages.

    Raises:
        InvalidValue: as for :func:`load`.
    """
    return typing.cast("T", _section(kind, values, place))


def _section(kind: type, values: Mapping[str, object], place: str, prefix: str = "", default: object = None) -> object:
    """Read a section; keys that are not given have the values of ``default``, or the defaults of its class."""
    hints, read = _hints(kind), dict[str, object]()
    for key in values:
        if key not in hints:
            raise _unknown(place, str(key), kind, prefix)
    for option_field in dataclasses.fields(kind):
        name, where = option_field.name, f"{place}: {prefix}{option_field.name}"
        default_value = option_field.default if default is None else getattr(default, name)
        if name in values:
            hint, value = hints[name], values[name]
            if _is_section(hint) and isinstance(value, Mapping):
                inner = typing.cast("type", hint)
                read[name] = _section(inner, value, place, f"{prefix}{name}.", default_value)
            else:
                read[name] = _value(hint, value, where)
        elif default_value is dataclasses.MISSING:
            raise InvalidValue(f"{where} is missing", hint=f"give {option_field.metadata['help']}")
        else:
            read[name] = default_value
    try:
        return kind(**read)
    except InvalidValue as error:  # raised by the dataclass's own check
        raise error.about(f"{place}: {prefix.removesuffix('.')}" if prefix else place) from None


def _value(hint: object, value: object, what: str) -> object:
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
    if hint == tuple[str, ...] and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-4 as text
            value = float(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (str, int, bool) and type(value) is hint:
        return value
    raise InvalidValue(f"{what} is {value!r}", hint=f"give {_kind(hint)}")


def _unknown(place: str, key: str, kind: type, prefix: str = "") -> InvalidValue:
    keys = list(_hints(kind))
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(keys)}"
    return InvalidValue(f"{place}: there is no key {prefix}{key}", hint=hint)


# --- writing ---------------------------------------------------------------------------------------------------------


def to_mapping(config: object) -> Values:
    """Return a configuration as a mapping for :func:`from_mapping`, defaults included."""
    return dataclasses.asdict(typing.cast("typing.Any", config))


def to_yaml(config: object) -> str:
    """Return a configuration as YAML text."""
    import yaml  # noqa: PLC0415 - only configurations need yaml

    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


def store(config: object, path: Path) -> None:
    """Write a configuration to a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as part:
        part.write_text(to_yaml(config), encoding="utf-8")


def describe(kind: type, prefix: str = "", default_of: object = None) -> Iterator[Described]:
    """Yield the documentation of all options in order, including the options of sections.

    Args:
        kind: the configuration's dataclass.
        prefix: a prefix for the options' keys.
        default_of: an instance whose values are the defaults; None for the defaults of the class.
    """
    hints = _hints(kind)
    for entry in dataclasses.fields(kind):
        key, hint = f"{prefix}{entry.name}", hints[entry.name]
        default_value = entry.default if default_of is None else getattr(default_of, entry.name)
        if _is_section(hint):
            yield from describe(typing.cast("type", hint), f"{key}.", default_value)
            continue
        choices = entry.metadata.get("choices") or ()
        default = "" if default_value is dataclasses.MISSING else _shown(default_value)
        words = " \\| ".join(choices) if choices else _kind(hint)
        yield Described(key, words, default, str(entry.metadata["help"]))


def differences(before: object, now: object, *, but: Iterable[str] = ()) -> list[str]:
    """Return the keys whose values differ between two configurations.

    Args:
        before: the first configuration.
        now: the second configuration.
        but: keys to ignore.
    """
    old, new = flat(before), flat(now)
    return sorted(key for key in old | new if old.get(key) != new.get(key) and key not in set(but))


def flat(config: object) -> Values:
    """Return a configuration as a mapping without nested mappings, with the keys ``section.key``."""
    return _flat(to_mapping(config))


def _flat(values: Values, prefix: str = "") -> Values:
    pairs: Values = {}
    for key, value in values.items():
        pairs |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return pairs


def _shown(value: object) -> str:
    import yaml  # noqa: PLC0415 - only configurations need yaml

    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _kind(hint: object) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if isinstance(hint, types.UnionType):
        return f"{' or '.join(_kind(part) for part in hint.__args__ if part is not types.NoneType)}, or null"
    return "a list of texts" if hint == tuple[str, ...] else words.get(typing.cast("type", hint), "a section of keys")


def _hints(kind: type) -> dict[str, object]:
    hints = typing.get_type_hints(kind)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(kind)}


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)
