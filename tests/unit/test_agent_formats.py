"""Action formats: what is read from answers, what is refused, and that nothing gets lost on the way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisandbox.agents import FORMATS, Action, Bash, Create, FormatError, Insert, StrReplace, Submit, View
from minisandbox.agents.actions import TOOLS
from minisandbox.models import Message, ToolCall

# What the formats are made of, so that texts are likely to collide with it.
PIECES = st.sampled_from(
    ["```", "````", "```bash", "`", "\n", "\n\n", " ", "=======", "========", "<<<<<<< SEARCH", ">>>>>>> REPLACE", '"',
     "<function=", "</function>", "<parameter=x>", "<think>", "</think>", "\r\n", "\t", "edit", "{", "\\", "\u2028"]
)  # fmt: skip
CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
TEXT = st.lists(PIECES | st.text(CHARACTERS, max_size=8), max_size=12).map("".join)
SOME = TEXT.filter(lambda text: bool(text.strip()))
NUMBER = st.integers(-3, 10**6)
ACTIONS = st.one_of(
    SOME.map(Bash),
    st.builds(View, SOME, st.none() | st.tuples(NUMBER, NUMBER)),
    st.builds(Create, SOME, TEXT),
    st.builds(StrReplace, SOME, TEXT.filter(bool), TEXT),
    st.builds(Insert, SOME, NUMBER, TEXT),
    st.just(Submit()),
)


def short(value: str) -> str:
    """What a test is called."""
    return value[:40]


def read(name: str, content: str) -> Action:
    (action,) = FORMATS[name].parse(Message("assistant", content))
    return action


def calls(*arguments: tuple[str, str]) -> Message:
    return Message("assistant", "", tuple(ToolCall(f"c{n}", *one) for n, one in enumerate(arguments)))


# --- what is said is what is read ------------------------------------------------------------------------------------


@given(ACTIONS)
def test_text_keeps_every_action(action: Action) -> None:
    message = FORMATS["text"].render(action)
    assert FORMATS["text"].parse(message) == (action,)
    assert read("text", f"I think\n{message.content}\nand no more") == action


@given(st.lists(ACTIONS, min_size=1, max_size=4))
def test_tool_calls_keep_every_action(actions: list[Action]) -> None:
    assert FORMATS["tool"].parse(FORMATS["tool"].render(*actions)) == tuple(actions)


@given(ACTIONS)
def test_xml_keeps_every_action_that_it_can_say(action: Action) -> None:
    try:
        message = FORMATS["xml"].render(action)
    except FormatError:
        assert "</parameter>" in repr(action)
        return
    assert FORMATS["xml"].parse(message) == (action,)


@pytest.mark.parametrize("name", ["text", "xml"])
def test_one_action_is_said_at_a_time(name: str) -> None:
    with pytest.raises(FormatError, match="one action"):
        FORMATS[name].render(Submit(), Submit())


@given(st.lists(PIECES, max_size=30).map("".join), st.sampled_from(sorted(FORMATS)))
def test_any_text_is_an_action_or_a_format_error(text: str, name: str) -> None:
    try:
        actions: object = FORMATS[name].parse(Message("assistant", text))
    except FormatError as error:
        actions = error.what
    assert actions


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), st.data())
def test_any_arguments_are_an_action_or_a_format_error(value: object, data: st.DataObject) -> None:
    tool = data.draw(st.sampled_from(["bash", "str_replace_editor", "submit", "no_tool"]))
    verbs = st.sampled_from(["view", "create", "str_replace", "insert", value])
    names = ("path", "file_text", "old_str", "new_str", "insert_line", "view_range")
    arguments = {name: data.draw(st.sampled_from([value, "text", 3])) for name in names} | {"command": data.draw(verbs)}
    try:
        actions: object = FORMATS["tool"].parse(calls((tool, json.dumps(arguments))))
    except FormatError as error:
        actions = error.what
    assert actions


# --- text ------------------------------------------------------------------------------------------------------------


def test_blocks_of_text() -> None:
    assert read("text", "Look.\n```bash\nls -l\necho `id`\n```\nDone.") == Bash("ls -l\necho `id`")
    assert read("text", "```bash  \nls\n```  \n") == Bash("ls")
    assert read("text", "````bash\ncat <<E\n```\nE\n````") == Bash("cat <<E\n```\nE")
    assert read("text", "```submit\n```") == Submit()
    assert read("text", "```submit\n\n```") == Submit()


def test_other_blocks_are_thoughts() -> None:
    assert read("text", "```python\n```bash\nno\n```\n\n```bash\nyes\n```") == Bash("yes")
    assert read("text", "Use ```bash``` so:\n```bash\nyes\n```") == Bash("yes")
    assert read("text", "```bash ls```\n```bash\nyes\n```") == Bash("yes")


def test_thoughts_that_the_engine_left_in() -> None:
    assert read("text", "<think>\n```bash\nno\n```\n</think>\n```bash\nyes\n```") == Bash("yes")
    assert read("xml", "<think><function=bash></think>" + str(FORMATS["xml"].render(Bash("yes")).content)) == Bash(
        "yes"
    )
    with pytest.raises(FormatError, match="no block"):
        read("text", "<think>\n```bash\nno\n```")


def test_edits_as_text() -> None:
    assert read("text", "```edit\nview a.py\n```") == View("a.py")
    assert read("text", "```edit\nview  a.py  3 -1 \n```") == View("a.py", (3, -1))
    assert read("text", '```edit\nview "my file" 1 2\n```') == View("my file", (1, 2))
    assert read("text", "```edit\ncreate a\n```") == Create("a", "")
    assert read("text", "```edit\ncreate a\nx\n\n```") == Create("a", "x\n")
    assert read("text", "```edit\ninsert a 0\nx\n```") == Insert("a", 0, "x")
    replace = "```edit\nstr_replace a\n<<<<<<< SEARCH\n  x\n=======\n>>>>>>> REPLACE\n\n```"
    assert read("text", replace) == StrReplace("a", "  x", "")


def test_longer_markers_let_a_text_hold_markers() -> None:
    block = "```edit\nstr_replace a\n<<<<<<<< SEARCH\nTitle\n=======\n========\nNew\n>>>>>>>> REPLACE\n```"
    assert read("text", block) == StrReplace("a", "Title\n=======", "New")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no blocks"),
        ("ls", "no blocks"),
        ("```\nls\n```", "no blocks"),
        ("```sh\nls\n```", "no blocks"),
        ("  ```bash\n  ls\n  ```", "no blocks"),
        ("```bash\nls\n```\n```bash\nls\n```", "2 blocks"),
        ("```bash\nls\n```\n```submit\n```", "2 blocks"),
        ("```bash\nls", "not closed"),
        ("```bash\ncat > R.md <<E\n```python\nx\n```\nE\n```", "not closed"),
        ("```bash\n\n```", "'command' is empty"),
        ("```bash\n\0\n```", "NUL"),
        ("```bash\n\ud800\n```", "UTF-8"),
        ("```submit\nnow\n```", "is empty"),
        ("```edit\n```", "first line"),
        ("```edit\n\n```", "'command' is empty"),
        ("```edit\ndelete a\n```", "no command for files"),
        ("```edit\nview\n```", "'path' is empty"),
        ("```edit\nview a 1\n```", "two line numbers"),
        ("```edit\nview a 1 2 3\n```", "two line numbers"),
        ("```edit\nview a one two\n```", "no line number"),
        ("```edit\nview my file\n```", "quotes"),
        ('```edit\nview "my file\n```', "quotes"),
        (f"```edit\nview a {'9' * 9999} 2\n```", "no line number"),
        ("```edit\nview a\nb\n```", "single line"),
        ("```edit\ncreate a 3\nx\n```", "more after the path"),
        ("```edit\ninsert a\nx\n```", "not a line number"),
        ("```edit\ninsert a 1 2\nx\n```", "more after the path"),
        ("```edit\nstr_replace a\nx\n```", "after str_replace PATH"),
        ("```edit\nstr_replace a\n```", "after str_replace PATH"),
        ("```edit\nstr_replace a\n<<<<<<< SEARCH\nx\n>>>>>>> REPLACE\n```", "one line ======="),
        ("```edit\nstr_replace a\n<<<<<<< SEARCH\nx\n=======\n=======\n>>>>>>> REPLACE\n```", "longer"),
        ("```edit\nstr_replace a\n<<<<<< SEARCH\nx\n======\ny\n>>>>>> REPLACE\n```", "after str_replace PATH"),
        ("```edit\nstr_replace a\n<<<<<<< SEARCH\n=======\nx\n>>>>>>> REPLACE\n```", "to replace is empty"),
        ("```edit\nstr_replace a\n<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE\nmore\n```", "after str_replace PATH"),
    ],
    ids=short,
)  # fmt: skip
def test_text_that_is_no_action(content: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        read("text", content)


# --- tool calls ------------------------------------------------------------------------------------------------------


def test_calls_are_taken_in_order() -> None:
    edit = '{"command": "view", "path": "a", "view_range": [1, 2], "old_str": null}'
    message = calls(("bash", '{"command": "ls"}'), ("str_replace_editor", edit), ("submit", ""))
    assert FORMATS["tool"].parse(message) == (Bash("ls"), View("a", (1, 2)), Submit())


@pytest.mark.parametrize(
    ("tool", "arguments", "problem"),
    [
        ("bash", '{"command": "ls"', "not JSON"),
        ("bash", "ls", "not JSON"),
        ("bash", "[" * 100_000, "not JSON"),
        ("str_replace_editor", f'{{"insert_line": {"9" * 9999}}}', "not JSON"),
        ("bash", '["ls"]', "not a JSON object"),
        ("bash", "{}", "'command' is missing"),
        ("bash", "", "'command' is missing"),
        ("bash", '{"command": 3}', "not a text"),
        ("bash", '{"command": " "}', "is empty"),
        ("bash", r'{"command": "a\u0000b"}', "NUL"),
        ("bash", f'{{"command": "{"x" * 500_001}"}}', "in parts"),
        ("bash", r'{"command": "a\ud800b"}', "UTF-8"),
        ("bash", '{"command": "ls", "timeout": 3}', "no parameter 'timeout'"),
        ("python", "{}", "no tool 'python'"),
        ("submit", '{"why": "x"}', "no parameter 'why'"),
        ("str_replace_editor", '{"command": "undo_edit", "path": "a"}', "no command for files"),
        ("str_replace_editor", '{"command": "view"}', "'path' is missing"),
        ("str_replace_editor", '{"command": "view", "path": "a", "view_range": [1]}', "two line numbers"),
        ("str_replace_editor", '{"command": "view", "path": "a", "view_range": [1, true]}', "two line numbers"),
        ("str_replace_editor", '{"command": "insert", "path": "a", "new_str": "x"}', "not a line number"),
        ("str_replace_editor", '{"command": "create", "path": "a"}', "'file_text' is missing"),
        ("str_replace_editor", '{"command": "str_replace", "path": "a", "old_str": ""}', "to replace is empty"),
    ],
    ids=short,
)  # fmt: skip
def test_calls_that_are_no_action(tool: str, arguments: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        FORMATS["tool"].parse(calls(("bash", '{"command": "ls"}'), (tool, arguments)))


def test_an_answer_without_calls() -> None:
    message = Message("assistant", "```bash\nls\n```")
    with pytest.raises(FormatError, match="calls no tool"):
        FORMATS["tool"].parse(message)
    assert FORMATS["tool"].correct(message, "no") == (Message("user", "no"),)


def test_an_answer_with_too_many_calls() -> None:
    assert len(FORMATS["tool"].parse(calls(*[("submit", "")] * 16))) == 16
    with pytest.raises(FormatError, match="17 calls"):
        FORMATS["tool"].parse(calls(*[("submit", "")] * 17))


def test_each_call_of_a_wrong_answer_is_answered() -> None:
    message = calls(("bash", "{}"), ("bash", "{}"))
    answers = FORMATS["tool"].correct(message, "no")
    assert [(one.role, one.tool_call_id) for one in answers] == [("tool", "c0"), ("tool", "c1")]
    assert FORMATS["tool"].observe(message, 1, "yes") == Message("tool", "yes", tool_call_id="c1")


def test_the_schemas_name_what_is_read() -> None:
    for tool in TOOLS:
        function = tool["function"]
        assert isinstance(function, dict)
        wrong: dict[str, object] = {name: {} for name in function["parameters"]["properties"]}
        if wrong:
            with pytest.raises(FormatError, match="not a text"):
                FORMATS["tool"].parse(calls((function["name"], json.dumps(wrong))))


# --- XML -------------------------------------------------------------------------------------------------------------


def test_functions() -> None:
    assert read("xml", "So:\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>") == Bash("ls")
    assert read("xml", "<function=bash><parameter=command>ls</parameter></function>\n") == Bash("ls")
    assert read("xml", "<function=submit>\n</function>") == Submit()
    body = "<parameter=command>view</parameter><parameter=path>/a</parameter><parameter=view_range>[1, 2]</parameter>"
    assert read("xml", f"<function=str_replace_editor>\n{body}\n</function>") == View("/a", (1, 2))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("ls", "no function call"),
        ("<function=bash", "no name"),
        ("<function=bash>", "not closed by </function>"),
        ("<function=bash><parameter=command>ls", "not closed by </parameter>"),
        ("<function=bash><parameter=command>ls</parameter>", "not closed by </function>"),
        ("<function=bash>ls</function>", "more than parameters"),
        ("<function=bash></function>", "'command' is missing"),
        ("<function=ls></function>", "no tool 'ls'"),
        ("<function=submit></function><function=submit></function>", "several"),
        ("<function=bash><parameter=" + "x" * 200 + ">", "no name"),
        ("<function=str_replace_editor><parameter=view_range>one</parameter></function>", "line number"),
    ],
    ids=short,
)  # fmt: skip
def test_xml_that_is_no_action(content: str, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        read("xml", content)


# --- answers that are meant to hurt ----------------------------------------------------------------------------------

MILLION = 1_000_000
LONG = {
    "backticks": "`" * 5 * MILLION,
    "fences": "```\n" * MILLION,
    "blocks": "```bash\n" * MILLION,
    "blanks": "```bash" + " " * 5 * MILLION + "x",
    "marker": "```edit\nstr_replace a\n" + "<" * 5 * MILLION,
    "markers": "```edit\nstr_replace a\n" + "<<<<<<< SEARCH\n" * MILLION + "\n```",
    "numbers": "```edit\nview a" + " 1" * MILLION + "\n```",
    "quotes": '```edit\nview "' + "\\" * 5 * MILLION + "\n```",
    "openings": "<function=bash>" + "<parameter=a>" * MILLION,
    "functions": "<function=" * MILLION,
    "parameters": "<function=bash>" + "<parameter=a></parameter>" * MILLION,
    "white space": "<function=bash>" + " " * 5 * MILLION,
    "thoughts": "<think>" * MILLION,
    "lines": "\n" * 10 * MILLION,
}


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("kind", LONG)
def test_long_answers_are_read_in_one_go(name: str, kind: str) -> None:
    """Were a parser's time not in proportion to the answer's length, this would not end."""
    with pytest.raises(FormatError) as caught:
        FORMATS[name].parse(Message("assistant", LONG[kind]))
    assert len(caught.value.what) < 600
