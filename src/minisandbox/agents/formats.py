"""Action formats: parse actions from a model's responses, and write the messages that report results to the model.

Every parser scans a response once, front to back, without regular expressions, so parsing takes linear time for any
input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from minisandbox.agents.actions import (
    BASH,
    EDITOR,
    SUBMIT,
    TOOLS,
    Action,
    Bash,
    Create,
    FormatError,
    Insert,
    StrReplace,
    Submit,
    View,
    action_of,
    arguments_of,
    name_of,
)
from minisandbox.models import Message, ToolCall

EDIT = "edit"
_LANGUAGES = (BASH, EDIT, SUBMIT)
"""The words at the opening fences of actions."""
_MIN_MARKER = 7  # characters of the markers around SEARCH and REPLACE
_THOUGHT = ("<think>", "</think>")


class _OneAction:
    """Base of formats without tool calls: a response has one action in its text, and user messages report results."""

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """An empty tuple, because the prompt describes the actions."""
        return ()

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the user message that reports a result."""
        del message, number
        return Message("user", text)

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return the user message with a correction."""
        del message
        return (Message("user", text),)

    def _single(self, actions: Sequence[Action]) -> Action:
        if len(actions) != 1:
            raise FormatError(f"a response in this format has one action, not {len(actions)}")
        return actions[0]


class TextFormat(_OneAction):
    """Actions as fenced blocks; see ``docs/reference/action-formats.md``.

    A block begins with a line of three or more backticks and a word, and ends with a line of at least as many
    backticks. Blocks with another word or without a word are part of the model's thoughts.
    """

    name = "text"
    reminder = f"Answer with exactly one block: ```{BASH}, ```{EDIT} or ```{SUBMIT}, closed by a line of ```."

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the response's one action.

        Raises:
            FormatError: the response has no action, several actions, or a malformed action.
        """
        blocks = [block for block in _blocks(without_thought(message.content)) if block[0] in _LANGUAGES]
        if len(blocks) != 1:
            names = ", ".join(_LANGUAGES)
            raise FormatError(f"Your answer has {len(blocks) or 'no'} blocks of {names}; it must have one.")
        language, lines = blocks[0]
        if language == EDIT:
            return (_edit(lines),)
        if language == BASH:
            return (action_of(BASH, {"command": "\n".join(lines)}),)
        if any(line.strip() for line in lines):
            raise FormatError(f"A {SUBMIT} block is empty.")
        return (Submit(),)

    def render(self, *actions: Action) -> Message:
        """Return a response with one action.

        Raises:
            FormatError: there is not exactly one action.
        """
        language, body = _block_of(self._single(actions))
        lines = body.split("\n") if body else []
        longest_fence = max((_fence(line)[0] for line in lines if not _fence(line)[1]), default=0)
        fence = "`" * max(3, longest_fence + 1)
        return Message("assistant", "\n".join([fence + language, *lines, fence]))


def without_thought(text: str) -> str:
    """Return a response without a leading ``<think>`` block that the engine left in the text."""
    if text.lstrip().startswith(_THOUGHT[0]):
        return text.partition(_THOUGHT[1])[2]
    return text


def beside_action(text: str) -> str:
    """Return a response's text before and after its action.

    Args:
        text: a response that :meth:`TextFormat.parse` accepts.
    """
    lines = text.split("\n")
    spans = ((start, end) for language, start, end in _spans(lines) if language in _LANGUAGES)
    start, end = next(spans, (len(lines) + 1, 0))
    texts = ("\n".join(lines[: start - 1]), "\n".join(lines[end + 1 :]) if end else "")
    return "\n\n".join(text.strip() for text in texts if text.strip())


def _fence(line: str) -> tuple[int, str]:
    """Return the number of backticks at the start of a line, and the text after them."""
    info = line.lstrip("`")
    return len(line) - len(info), info.strip()


def _blocks(text: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each fenced block of a text: the word at the opening fence, and the lines of the block."""
    lines = text.split("\n")
    for language, start, end in _spans(lines):
        yield language, lines[start:end]


def _spans(lines: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each fenced block: the word at the opening fence, and the start and end of the lines between the fences."""
    fence_length, language, start = 0, "", 0
    for index, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        length, info = _fence(line)
        if fence_length and length >= fence_length and not info:
            yield language, start, index
            fence_length = 0
        elif not fence_length and "`" not in info:  # a line of ```inline code``` is not a fence
            fence_length, language, start = length, info, index + 1
    if fence_length:
        raise FormatError(
            f"The block that begins with {'`' * min(fence_length, 9)}{language[:40]} is not closed. "
            "If a block holds lines of ``` itself, begin and end it with ````."
        )


# --- edits -----------------------------------------------------------------------------------------------------------


def _edit(lines: Sequence[str]) -> Action:
    if not lines:
        raise FormatError(f"The {EDIT} block is empty. Its first line says what to do: view, create, str_replace ...")
    verb, path, numbers = _header(lines[0])
    arguments: dict[str, object] = {"command": verb, "path": path}
    body = lines[1:]
    if verb == "view":
        arguments["view_range"] = numbers or None
        numbers = []
        if any(line.strip() for line in body):
            raise FormatError(f"{EDIT}: view is a single line.")
    elif verb == "create":
        arguments["file_text"] = "\n".join(body)
    elif verb == "insert":
        arguments |= {"insert_line": numbers[0] if numbers else None, "new_str": "\n".join(body)}
        numbers = numbers[1:]
    elif verb == "str_replace":
        old_lines, new_lines = _search_and_replace(body)
        arguments |= {"old_str": "\n".join(old_lines), "new_str": "\n".join(new_lines)}
    if numbers:
        raise FormatError(f"{EDIT}: there is more after the path than {verb} takes. Put a path with spaces in quotes.")
    return action_of(EDITOR, arguments)


def _header(line: str) -> tuple[str, str, list[int]]:
    """Parse the line ``VERB PATH NUMBER...``; a path in double quotes is a JSON string."""
    verb, _, arguments = line.strip().partition(" ")
    arguments = arguments.lstrip()
    if arguments.startswith('"'):
        try:
            path, end = json.JSONDecoder().raw_decode(arguments)
        except ValueError:
            raise FormatError(f"{EDIT}: the quotes of the path are not closed.") from None
        numbers = arguments[end:]
    else:
        path, _, numbers = arguments.partition(" ")
    try:
        return verb, path, [int(number) for number in numbers.split()]
    except ValueError:
        raise FormatError(
            f"{EDIT}: {numbers.strip()[:80]!r} is no line number. Put a path with spaces in quotes."
        ) from None


def _search_and_replace(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the lines to search for and their replacement. The three markers have equal lengths of seven or more."""
    body = list(lines)
    while body and not body[-1].strip():
        body.pop()
    first_line = body[0].rstrip() if body else ""
    length = len(first_line) - len(first_line.lstrip("<"))
    opening, separator, closing = _markers(length)
    separators = [index for index, line in enumerate(body) if line.rstrip() == separator]
    if length < _MIN_MARKER or first_line != opening or body[-1].rstrip() != closing:
        raise FormatError(
            f"{EDIT}: after str_replace PATH come the lines <<<<<<< SEARCH, the old text, =======, the new text, "
            ">>>>>>> REPLACE."
        )
    if len(separators) != 1 or any(line.rstrip() == closing for line in body[:-1]):
        raise FormatError(
            f"{EDIT}: between SEARCH and REPLACE there must be one line {separator[:20]} that separates the texts. "
            "If the text holds such lines itself, make all three markers longer."
        )
    return body[1 : separators[0]], body[separators[0] + 1 : -1]


def _markers(length: int) -> tuple[str, str, str]:
    """Return the lines before, between and after the texts of a ``str_replace``."""
    return "<" * length + " SEARCH", "=" * length, ">" * length + " REPLACE"


# --- rendering --------------------------------------------------------------------------------------------------------


def _block_of(action: Action) -> tuple[str, str]:
    """Return the word at the fence and the text of an action's block."""
    match action:
        case Bash(command):
            return BASH, command
        case Submit():
            return SUBMIT, ""
        case View(path, lines):
            numbers = "" if lines is None else f" {lines[0]} {lines[1]}"
            return EDIT, f"view {_quoted(path)}{numbers}"
        case Create(path, text):
            return EDIT, _joined(f"create {_quoted(path)}", text)
        case Insert(path, line, text):
            return EDIT, _joined(f"insert {_quoted(path)} {line}", text)
        case StrReplace(path, old_text, new_text):
            length = _MIN_MARKER
            text_lines = {line.rstrip() for line in f"{old_text}\n{new_text}".split("\n")}
            while text_lines & {*_markers(length)[1:]}:
                length += 1
            opening, separator, closing = _markers(length)
            return EDIT, _joined(f"str_replace {_quoted(path)}", opening, old_text, separator, new_text, closing)


def _joined(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _quoted(path: str) -> str:
    is_plain = path.isprintable() and not any(character.isspace() or character in "\"`'" for character in path)
    return path if is_plain else json.dumps(path)


MAX_CALLS = 16
"""Maximum tool calls in one response. A response counts as one step, so the step limit does not bound its calls."""


class ToolFormat:
    """Actions as tool calls. If one call is malformed, no call of the response is performed."""

    name = "tool"
    reminder = f"Answer with a call of a tool: {BASH}, or {SUBMIT} when you are done."

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The tools' schemas."""
        return TOOLS

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the response's actions, in order.

        Raises:
            FormatError: the response has no calls, too many calls, or a malformed call.
        """
        if not message.tool_calls:
            raise FormatError("Your answer calls no tool.")
        if len(message.tool_calls) > MAX_CALLS:
            raise FormatError(f"Your answer has {len(message.tool_calls)} calls; it may have {MAX_CALLS}.")
        return tuple(_action(call) for call in message.tool_calls)

    def render(self, *actions: Action) -> Message:
        """Return a response with these actions as numbered calls."""
        calls = (
            ToolCall(f"call_{number}", name_of(action), json.dumps(arguments_of(action)))
            for number, action in enumerate(actions)
        )
        return Message("assistant", "", tuple(calls))

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the tool message with a call's result."""
        return Message("tool", text, tool_call_id=message.tool_calls[number].id)

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return a tool message for each call, because engines require one, or a user message if there was no call."""
        if not message.tool_calls:
            return (Message("user", text),)
        return tuple(Message("tool", text, tool_call_id=call.id) for call in message.tool_calls)


def _action(call: ToolCall) -> Action:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "it is too deep, or a number is too long"
        raise FormatError(f"The arguments of {call.name[:80]!r} are not JSON: {reason[:200]}.") from None
    if not isinstance(arguments, dict):
        raise FormatError(f"The arguments of {call.name[:80]!r} are not a JSON object.")
    return action_of(call.name, arguments)


FUNCTION = "<function="
"""The text with which a function call begins in SWE-smith's format."""
_FUNCTION_END = "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NUMBERS = ("insert_line", "view_range")
_OWN_LINES = ("old_str", "new_str", "file_text")
"""The parameters whose values SWE-smith writes on lines of their own."""


class XmlFormat(_OneAction):
    """Actions in the format of SWE-agent's ``xml_function_calling``: one ``<function=NAME>`` with its parameters.

    The format only resembles XML: it has no escapes, and a value ends at the first ``</parameter>``.
    """

    name = "xml"
    reminder = f"Answer with exactly one function call: <function={BASH}>, or <function={SUBMIT}> when you are done."

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the response's one action.

        Raises:
            FormatError: the response has no action, several actions, or a malformed action.
        """
        text = without_thought(message.content)
        start = text.find(FUNCTION)
        if start < 0:
            raise FormatError("Your answer has no function call.")
        name, arguments, end = read_function(text, start)
        if text.find(FUNCTION, end) >= 0:
            raise FormatError("Your answer has several function calls; it must have one.")
        return (action_of(name, arguments),)

    def render(self, *actions: Action) -> Message:
        """Return a response with one call.

        Raises:
            FormatError: there is not exactly one action, or a value contains the end of a parameter.
        """
        action = self._single(actions)
        return Message("assistant", write_function(name_of(action), arguments_of(action)))


def read_function(text: str, start: int) -> tuple[str, dict[str, object], int]:
    """Parse a function call in SWE-smith's format.

    Args:
        text: a response.
        start: the position of :data:`FUNCTION` in the text.

    Returns:
        The function's name, its arguments, and the position after the call.

    Raises:
        FormatError: the call is malformed.
    """
    name, position = _name(text, start + len(FUNCTION))
    arguments: dict[str, object] = {}
    while text.startswith(_PARAMETER, position := _next(text, position)):
        parameter, value_start = _name(text, position + len(_PARAMETER))
        end = text.find(_PARAMETER_END, value_start)
        if end < 0:
            raise FormatError(f"The parameter {parameter[:80]!r} is not closed by {_PARAMETER_END}.")
        arguments[parameter] = _value(parameter, text[value_start:end])
        position = end + len(_PARAMETER_END)
    if not text.startswith(_FUNCTION_END, position):
        raise FormatError(f"The function call is not closed by {_FUNCTION_END}, or holds more than parameters.")
    return name, arguments, position + len(_FUNCTION_END)


def write_function(name: str, arguments: Mapping[str, object]) -> str:
    """Return a function call in SWE-smith's layout, which :func:`read_function` parses.

    Args:
        name: the function's name.
        arguments: its arguments.

    Raises:
        FormatError: a value contains the closing tag of parameters, which the format cannot escape.
    """
    lines = [f"{FUNCTION}{name}>"]
    for parameter, argument in arguments.items():
        text = argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)
        if _PARAMETER_END in text:
            raise FormatError(f"the value of {parameter!r} contains {_PARAMETER_END}, which the format cannot escape")
        on_own_lines = parameter in _OWN_LINES or text.startswith("\n") or text.endswith("\n")
        lines.append(f"{_PARAMETER}{parameter}>" + (f"\n{text}\n" if on_own_lines else text) + _PARAMETER_END)
    return "\n".join([*lines, _FUNCTION_END])


def _name(text: str, start: int) -> tuple[str, int]:
    """Return a name up to ``>``, and the position after it."""
    end = text.find(">", start, start + 100)
    if end < 0:
        raise FormatError(f"{text[start - 10 : start + 20]!r} has no name with a > after it.")
    return text[start:end], end + 1


def _next(text: str, position: int) -> int:
    """Return the position after white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _value(parameter: str, text: str) -> object:
    """Return a value without the newlines around it; parse numbers as JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    if parameter not in _NUMBERS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(f"The parameter {parameter!r} is not a line number, or two as [1, 20].") from None


class ActionFormat(Protocol):
    """A format in which a model's responses express actions.

    Attributes:
        name: the format's name in options.
        reminder: a sentence that reminds a model of the format after a malformed response.
    """

    name: str
    reminder: str

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """The schemas of the tools to send with each request."""
        ...

    def parse(self, message: Message) -> tuple[Action, ...]:
        """Return the actions of a response, in order; at least one.

        Raises:
            FormatError: the response has no actions, too many actions, or a malformed action.
        """
        ...

    def render(self, *actions: Action) -> Message:
        """Return a response with these actions; :meth:`parse` is the inverse.

        Raises:
            FormatError: this format cannot express them.
        """
        ...

    def observe(self, message: Message, number: int, text: str) -> Message:
        """Return the message that reports the result of one action of a response.

        Args:
            message: the response.
            number: the index of the action in the response.
            text: the result.
        """
        ...

    def correct(self, message: Message, text: str) -> tuple[Message, ...]:
        """Return the messages that explain to the model why no action of its response was performed."""
        ...


FORMATS: Mapping[str, ActionFormat] = {form.name: form for form in (TextFormat(), ToolFormat(), XmlFormat())}
"""The action formats by name."""
