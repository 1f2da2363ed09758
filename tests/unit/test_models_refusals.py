"""What is told of a server's refusal never has the key, however it is escaped."""

from __future__ import annotations

import json
import time

import pytest

from minisandbox.models.capture import CaptureProxy
from minisandbox.models.refusals import without_key
from minisandbox.models.transport import LARGEST_REFUSAL, Answer


def test_a_key_with_a_quote_is_not_told_either() -> None:
    key = 'sk-"quoted\\and-more'
    assert without_key(json.dumps({"error": f"bad key {key}"}), key) == '{"error": "bad key ***"}'
    assert without_key(f"bad key {key}", key) == "bad key ***"
    assert without_key("no key", "") == without_key("no key", "\\") == "no key"


@pytest.mark.parametrize("key", ['sk-ENGINE/key"9\\z', "\\begins", "ends-in\\\\", 'two\\\\"in', "uuuu"])
def test_a_key_may_be_escaped_any_number_of_times(key: str) -> None:
    plain = f"{key}:{key}"
    wholly = "".join(f"\\u{ord(sign):04x}" for sign in plain)
    for _ in range(9):
        assert without_key(plain, key).replace("\\", "") == "***:***"
        assert without_key(wholly, key).replace("\\", "").replace("u005c", "") == "***u003a***"
        plain, wholly = json.dumps(plain)[1:-1], json.dumps(wholly)[1:-1]


@pytest.mark.parametrize("key", ['sk-ENGINE/key"9\\z', "\\begins", "uuuu"])
def test_looking_for_a_key_takes_no_longer_for_many_backslashes(key: str) -> None:
    begun = time.process_time()
    for text in ("\\" * 1_000_000, key[:-1] + "\\u005c" * 100_000, f"{key[0]}\\" * 500_000, key[:-1] * 100_000):
        without_key(text, key)
    assert time.process_time() - begun < 10  # measured: 0.2; by looking from each backslash: hours


def test_half_of_an_escaped_key_at_the_end_of_what_was_read_is_not_told() -> None:
    key = "sk-ENGINEKEY-0123456789"
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in key)
    proxy = CaptureProxy("http://127.0.0.1:9/v1", api_key=key)
    with pytest.raises(Exception, match=r"it repeats the engine's key$"):
        proxy._read(Answer(500, {}, ((escaped + " ") * 900).encode()[:LARGEST_REFUSAL]))
