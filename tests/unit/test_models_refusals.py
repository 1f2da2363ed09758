"""What is told of a server's refusal never has the key, however it is escaped."""

from __future__ import annotations

import json
import time

import pytest

from minisandbox.models.capture import CaptureProxy
from minisandbox.models.http import LARGEST_REFUSAL, Answer, clean
from minisandbox.redaction import redact


def test_a_key_with_a_quote_is_not_told_either() -> None:
    key = 'sk-"quoted\\and-more'
    assert redact(json.dumps({"error": f"bad key {key}"}), key) == '{"error": "bad key ***"}'
    assert redact(f"bad key {key}", key) == "bad key ***"
    assert redact("no key", "") == redact("no key", "\\") == "no key"


@pytest.mark.parametrize("key", ['sk-ENGINE/key"9\\z', "\\begins", "ends-in\\\\", 'two\\\\"in', "uuuu"])
def test_a_key_may_be_escaped_any_number_of_times(key: str) -> None:
    plain = f"{key}:{key}"
    wholly = "".join(f"\\u{ord(sign):04x}" for sign in plain)
    for _ in range(9):
        assert redact(plain, key).replace("\\", "") == "***:***"
        assert redact(wholly, key).replace("\\", "").replace("u005c", "") == "***u003a***"
        plain, wholly = json.dumps(plain)[1:-1], json.dumps(wholly)[1:-1]


@pytest.mark.parametrize("key", ['sk-ENGINE/key"9\\z', "\\begins", "uuuu"])
def test_looking_for_a_key_takes_no_longer_for_many_backslashes(key: str) -> None:
    begun = time.process_time()
    for text in ("\\" * 1_000_000, key[:-1] + "\\u005c" * 100_000, f"{key[0]}\\" * 500_000, key[:-1] * 100_000):
        redact(text, key)
    assert time.process_time() - begun < 10  # measured: 0.2; by looking from each backslash: hours


def test_half_of_an_escaped_key_at_the_end_of_what_was_read_is_not_told() -> None:
    key = "sk-ENGINEKEY-0123456789"
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    proxy = CaptureProxy("http://127.0.0.1:9/v1", api_key=key)
    with pytest.raises(Exception, match=r"it contains the API key$"):
        proxy._read(Answer(500, {}, ((escaped + " ") * 900).encode()[:LARGEST_REFUSAL]))


KEY = "sk-ENGINEKEY-0123456789"
PARTS = [KEY[3:-3] + " is no key", "no key: " + KEY[:-1], KEY.upper() + "?", json.dumps(KEY[:7])[:-1], "x" + KEY[-12:]]


@pytest.mark.parametrize("said", [*PARTS, "".join(f"\\u{ord(sign):04x}" for sign in KEY[2:16]), "sk-EN\\u0047\\u004"])
def test_of_a_text_with_a_part_of_the_key_nothing_is_told(said: str) -> None:
    assert redact(said, KEY) == clean(said, KEY) == "it contains the API key"


@pytest.mark.parametrize("said", ["", "a key begins with sk-ENGINEKE, not so", "\\u0073k", "no part", "sk-EN", "9"])
def test_what_has_no_part_of_the_key_is_told_whole(said: str) -> None:
    assert redact(said, KEY) == said


def test_an_answer_that_repeats_the_key_is_passed_on_only_without_it() -> None:
    proxy = CaptureProxy("http://127.0.0.1:9/v1", api_key=KEY)
    answer = {"choices": [{"message": {"role": "assistant", "content": "x"}, "error": "of " + KEY}]}
    for status in (200, 500):
        with pytest.raises(Exception, match=r"it contains the API key$" if status == 200 else r"of \*\*\*"):
            proxy._read(Answer(status, {}, json.dumps(answer).encode()))
    with pytest.raises(Exception, match=r"it contains the API key$"):
        proxy._read(Answer(500, {}, json.dumps({"error": KEY[:-1]}).encode()))
    short = CaptureProxy("http://127.0.0.1:9/v1", api_key="not-needed")
    assert short._read(Answer(200, {}, b'{"choices": ["not-needed"]}'))
