"""Exact tokens of earlier conversations, by their text, so that the next prompt starts with the very same tokens.

Text does not determine its tokens: a model may sample ``ab`` as ``a`` and ``b``, where a tokenizer makes one token.
So each conversation is stored with its text under the chat template, up to the end of the latest response. When a later
text starts with that text, its tokens are reused, and only the rest is tokenized.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Conversations:
    """The conversations that an engine remembers; drops the least recently used.

    Args:
        encode: tokenizes a text without adding tokens.
        ends: the texts of tokens that end a response.
        capacity: maximum tokens of all conversations together.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], ends: Sequence[str], *, capacity: int = 1 << 24) -> None:
        self._encode = encode
        self._ends = re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")
        self._capacity = capacity
        self._held = 0
        self._lock = threading.Lock()  # prompts are also counted outside the engine's thread
        self._known: OrderedDict[tuple[str, bytes], array[int]] = OrderedDict()

    def encode(self, text: str, session: str = "") -> array[int]:
        """Return a prompt's tokens: those of the longest known conversation that it starts with, then the rest's.

        Args:
            text: the prompt under the chat template.
            session: the rollout, whose own conversations win over others with equal text and different tokens.
        """
        best, mark, end = array("i"), 0, 0
        with self._lock:
            for start, position, digest in self._beginnings(text):
                for key in ((session, digest), ("", digest)):
                    if key in self._known:
                        self._known.move_to_end(key)
                        best, mark, end = self._known[key], start, position
                        break
        # Tokenize the rest with the end token before it: alone, it might get a space mark, or spaces of that token.
        rest = array("i", self._encode(text[mark:]))
        if mark < end:
            rest = rest[1:] if rest[:1] == best[-1:] else array("i", self._encode(text[end:]))
        return best + rest

    def keep(self, before: str, text: str, ids: array[int], session: str = "") -> None:
        """Remember a conversation that ends with a response.

        Args:
            before: the text without the response.
            text: the text with it; the template's text after the response's end is ignored.
            ids: the tokens read and sampled.
            session: the rollout.
        """
        ends = [match.start() for match in self._ends.finditer(text, len(before))]
        if not text.startswith(before) or not ends:
            return  # template and model end responses differently: nothing to remember
        # A truncated response has no end token of its own: the template's is not among its tokens.
        match = self._ends.match(text, ends[-1])
        complete = match is not None and ids[-1:] == array("i", self._encode(match[0]))
        end = match.end() if match is not None and complete else ends[-1]
        digest = hashlib.sha256(text[:end].encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            for key in {(session, digest), ("", digest)}:
                self._held += len(ids) - len(self._known.pop(key, ()))
                self._known[key] = ids
            while self._held > self._capacity:
                self._held -= len(self._known.popitem(last=False)[1])

    def _beginnings(self, text: str) -> Iterator[tuple[int, int, bytes]]:
        """Yield each end token's start, a position where a conversation may end, and the hash of the text before it."""
        digest, done = hashlib.sha256(), 0
        for match in self._ends.finditer(text):
            for position in (match.start(), match.end()):
                digest.update(text[done:position].encode("utf-8", "surrogatepass"))
                done = position
                yield match.start(), position, digest.copy().digest()
