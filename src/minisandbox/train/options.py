"""Configurations: frozen dataclasses, read from one YAML file and from ``key=value`` on the command line.

A field is the only definition of its option. Its type says what is read, its default what it is without, and its
``help`` what documentation says. A field whose type is such a dataclass is a section; its keys are ``section.key``.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from minisandbox.errors import InvalidValue, NotFound
from minisandbox.tasks.writing import written_whole

T = TypeVar("T")
Values = dict[str, object]


def option(default: T, *, help: str, choices: tuple[str, ...] = ()) -> T:  # noqa: A002 - what the field's metadata call it
    """Return a dataclass's field.

    Args:
        default: its value where nothing is given.
        help: what it does, for documentation.
        choices: the texts that there are, if not all.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def required(help: str) -> typing.Any:  # noqa: A002 - as above
    """Return the field of an option that has to be given; ``Any``, as it stands for a value of whatever type.

    Args:
        help: what it does, for documentation.
    """
    return dataclasses.field(metadata={"help": help})


def positive(**values: float) -> None:
    """Check that numbers are more than 0.

    Raises:
        InvalidValue: one is not; it is named.
    """
    for name, value in values.items():
        if not value > 0:
            raise InvalidValue(f"{name} is {value!r}", hint="give more than 0")


def reward_or_none(name: str, value: float | None) -> None:
    """Check the reward of what has none by default.

    Args:
        name: the option.
        value: its value.

    Raises:
        InvalidValue: it is neither None nor between 0 and 1.
    """
    if value is not None and not 0 <= value <= 1:
        raise InvalidValue(f"{name} is {value!r}", hint="give null, or a number from 0 to 1")


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """One option, as documentation has it.

    Attributes:
        key: as files and the command line have it.
        kind: its type in words.
        default: as YAML has it; empty where it has to be given.
        help: what it does.
    """

    key: str
    kind: str
    default: str
    help: str


# --- reading ---------------------------------------------------------------------------------------------------------


def load(kind: type[T], name: str, settings: Sequence[str] = ()) -> T:
    """Read a configuration.

    Args:
        kind: its dataclass.
        name: a YAML file, or the name of one that comes with the package.
        settings: ``key=value``, the value as YAML has it; they come after the file.

    Raises:
        NotFound: there is no such file.
        InvalidValue: a key is unknown, a value is of another type or cannot be used, or one is missing. The message
            names the file, and the nearest key there is.
    """
    text, place = _text_of(name)
    values = _parsed(text, place)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InvalidValue(
            f"{place} is no table", reason="a configuration is keys with values", hint="write key: value"
        )
    for setting in settings:
        _set(kind, values, setting)
    return from_mapping(kind, values, place=place)


def packaged() -> tuple[str, ...]:
    """Return the names of the configurations that come with the package."""
    directory = resources.files("minisandbox.train") / "configs"
    return tuple(sorted(one.name.removesuffix(".yaml") for one in directory.iterdir() if one.name.endswith(".yaml")))


def _text_of(name: str) -> tuple[str, str]:
    path = Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8"), name
    if name in packaged():
        file = resources.files("minisandbox.train") / "configs" / f"{name}.yaml"
        return file.read_text(encoding="utf-8"), f"{name} (of the package)"
    raise NotFound(f"{name}: no such file", hint=f"a YAML file, or one of the package: {', '.join(packaged())}")


def _parsed(text: str, what: str) -> object:
    import yaml  # noqa: PLC0415 - only configurations need it

    class Loader(yaml.SafeLoader):
        """YAML's own, but that a key that stands there twice is an error: the first one would be without effect."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [str(key.value) for key, _ in node.value]
            if twice := sorted({key for key in keys if keys.count(key) > 1}):
                raise InvalidValue(f"{what}: {twice[0]} is there twice", hint="leave out one of them")
            return super().construct_mapping(node, deep)

    try:
        value: object = yaml.load(text, Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.YAMLError as error:
        raise InvalidValue(
            f"{what} is not valid YAML", reason=str(error), hint="correct the line that is named"
        ) from error
    return value


def _set(kind: type, values: Values, setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals:
        raise InvalidValue(f"--set {setting}: no value", hint="--set key=value")
    value = _parsed(text, f"--set {setting}: the value")
    table, section = values, kind
    *parents, last = key.split(".")
    for parent in parents:
        inner = _hints(section).get(parent)
        if inner is None:
            raise _unknown(f"--set {setting}", parent, section)
        if not _is_section(inner):
            raise InvalidValue(f"--set {setting}: {parent} is {_kind(inner)}, and has no keys")
        section = typing.cast("type", inner)
        below = table.setdefault(parent, {})
        if not isinstance(below, dict):
            raise InvalidValue(
                f"--set {setting}: {parent} has the value {below!r} in the file",
                hint=f"make it a section: {parent}.{last}",
            )
        table = below
    if last not in _hints(section):
        raise _unknown(f"--set {setting}", last, section)
    table[last] = value


def from_mapping(kind: type[T], values: Mapping[str, object], *, place: str) -> T:
    """Return the configuration that a table stands for.

    Args:
        kind: its dataclass.
        values: the table.
        place: what errors call it.

    Raises:
        InvalidValue: as of :func:`load`.
    """
    return typing.cast("T", _section(kind, values, place, ""))


def _section(kind: type, values: Mapping[str, object], place: str, prefix: str) -> object:
    hints, read = _hints(kind), {}
    for key, value in values.items():
        if key not in hints:
            raise _unknown(place, str(key), kind, prefix)
        one = hints[key]
        if _is_section(one) and isinstance(value, Mapping):
            whole = _over(_default_of(kind, key), value)
            read[key] = _section(typing.cast("type", one), whole, place, f"{prefix}{key}.")
        else:
            read[key] = _value(one, value, f"{place}: {prefix}{key}")
    for one in _fields(kind):
        if one.name not in read and _is_required(one):
            raise InvalidValue(f"{place}: {prefix}{one.name} is missing", reason=str(one.metadata.get("help", "")))
        _check_choice(one, read, f"{place}: {prefix}{one.name}")
    try:
        return kind(**read)
    except InvalidValue as error:  # a section looks at its own values
        raise error.about(place) from None


def _default_of(kind: type, name: str) -> Values:
    """What a section is without any key of it: this configuration's own default, not that of the section's class."""
    (default,) = (one.default for one in _fields(kind) if one.name == name)
    return {} if default is dataclasses.MISSING else to_mapping(default)


def _over(table: Mapping[str, object], values: Mapping[str, object]) -> Values:
    found = dict(table)
    for key, value in values.items():
        below = found.get(key)
        found[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return found


def _value(hint: object, value: object, what: str) -> object:
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        hint = next(one for one in hint.__args__ if one is not types.NoneType)
    if hint == tuple[str, ...] and isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if hint is float and isinstance(value, str):
        value = _number(value)  # YAML 1.1 takes 1e-4 for text
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (str, int, bool) and type(value) is hint:
        return value
    raise InvalidValue(f"{what} is {value!r}", hint=f"it is {_kind(hint)}")


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def _check_choice(one: dataclasses.Field[object], read: Mapping[str, object], what: str) -> None:
    choices = one.metadata.get("choices")
    if choices and one.name in read and read[one.name] not in choices:
        raise InvalidValue(f"{what} is {read[one.name]!r}", hint=f"one of {', '.join(choices)}")


def _unknown(place: str, key: str, kind: type, prefix: str = "") -> InvalidValue:
    known = list(_hints(kind))
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"there are {', '.join(known)}"
    return InvalidValue(f"{place}: there is no key {prefix}{key}", hint=hint)


# --- writing ---------------------------------------------------------------------------------------------------------


def to_mapping(config: object) -> Values:
    """Return what :func:`from_mapping` reads, whole: what was left out is in it with its default."""
    found: Values = {}
    for one in _fields(type(config)):
        value = getattr(config, one.name)
        if dataclasses.is_dataclass(value):
            found[one.name] = to_mapping(value)
        else:
            found[one.name] = list(value) if isinstance(value, tuple) else value
    return found


def to_yaml(config: object) -> str:
    """Return a configuration as the text of a file."""
    import yaml  # noqa: PLC0415 - only configurations need it

    return yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True)


def store(config: object, path: Path) -> None:
    """Write a configuration, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as part:
        part.write_text(to_yaml(config), encoding="utf-8")


def describe(kind: type, prefix: str = "", default_of: object = None) -> Iterator[Described]:
    """Return the options of a configuration, in their order, those of its sections among them.

    Args:
        kind: its dataclass.
        prefix: what stands before its keys.
        default_of: of a section, what it is where none of its keys is given.
    """
    hints = _hints(kind)
    for one in _fields(kind):
        without = one.default if default_of is None else getattr(default_of, one.name)
        if _is_section(hints[one.name]):
            yield from describe(typing.cast("type", hints[one.name]), f"{prefix}{one.name}.", without)
            continue
        choices = one.metadata.get("choices") or ()
        default = "" if _is_required(one) else _shown(without)
        kind_of = " \\| ".join(choices) if choices else _kind(hints[one.name])
        yield Described(f"{prefix}{one.name}", kind_of, default, str(one.metadata["help"]))


def differences(before: object, now: object, *, but: Iterable[str] = ()) -> list[str]:
    """Return the keys in which two configurations differ.

    Args:
        before: one.
        now: the other.
        but: keys that may.
    """
    one, other = _flat(to_mapping(before)), _flat(to_mapping(now))
    return sorted(key for key in one | other if one.get(key) != other.get(key) and key not in set(but))


def _flat(values: Values, prefix: str = "") -> Values:
    found: Values = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _shown(value: object) -> str:
    import yaml  # noqa: PLC0415 - only configurations need it

    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


def _kind(hint: object) -> str:
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if isinstance(hint, types.UnionType):
        return f"{' or '.join(_kind(one) for one in hint.__args__ if one is not types.NoneType)}, or null"
    return "a list of texts" if hint == tuple[str, ...] else words.get(typing.cast("type", hint), "a section of keys")


def _fields(kind: type) -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(kind)


def _hints(kind: type) -> dict[str, object]:
    hints = typing.get_type_hints(kind)
    return {one.name: hints[one.name] for one in _fields(kind)}


def _is_section(hint: object) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_required(one: dataclasses.Field[object]) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
