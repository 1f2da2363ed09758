"""Exact tokens of conversations, by their text: what makes the next prompt begin with what was read and sampled.

Text does not say which tokens it was: a model may sample ``ab`` as ``a`` and ``b``, and a tokenizer makes one token of
it. So a conversation is kept with the text that the chat template makes of it, up to the end of the latest answer. When
a later text begins with that one, its tokens are those, and only the rest is tokenized.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence


class Conversations:
    """The conversations that an engine remembers; the least recently used are forgotten.

    Args:
        encode: tokenizes a text, adding nothing to it.
        ends: texts of the tokens that end an answer.
        capacity: tokens of all conversations together.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]], ends: Sequence[str], *, capacity: int = 1 << 24) -> None:
        self._encode = encode
        self._ends = re.compile("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))) or r"(?!)")
        self._capacity = capacity
        self._held = 0
        self._known: OrderedDict[tuple[str, bytes], array[int]] = OrderedDict()

    def encode(self, text: str, session: str = "") -> array[int]:
        """Return a prompt's tokens: those of the longest conversation that it begins with, and the rest tokenized.

        Args:
            text: the prompt, as the chat template makes it.
            session: whose; of two conversations with one text and different tokens its own is taken.
        """
        best, end = array("i"), 0
        for position, digest in self._beginnings(text):
            for key in ((session, digest), ("", digest)):
                if key in self._known:
                    self._known.move_to_end(key)
                    best, end = self._known[key], position
                    break
        return best + array("i", self._encode(text[end:]))

    def keep(self, before: str, text: str, ids: array[int], session: str = "") -> None:
        """Remember a conversation that ends with an answer.

        Args:
            before: the text without the answer.
            text: the text with it. What the template has after the answer's end is not part of what is remembered.
            ids: what was read and sampled.
            session: whose it is.
        """
        ends = [match.start() for match in self._ends.finditer(text, len(before))]
        if not text.startswith(before) or not ends:
            return  # the template ends answers otherwise than the model does: the text alone has to do
        # An answer that was cut off has no end of its own: the template's is not among its tokens.
        match = self._ends.match(text, ends[-1])
        complete = match is not None and ids[-1:] == array("i", self._encode(match[0]))
        end = match.end() if match is not None and complete else ends[-1]
        digest = hashlib.sha256(text[:end].encode("utf-8", "surrogatepass")).digest()
        for key in {(session, digest), ("", digest)}:
            self._held += len(ids) - len(self._known.pop(key, ()))
            self._known[key] = ids
        while self._held > self._capacity:
            self._held -= len(self._known.popitem(last=False)[1])

    def _beginnings(self, text: str) -> Iterator[tuple[int, bytes]]:
        """Each place where a remembered conversation may end, from the left, and the hash of the text until there."""
        digest, done = hashlib.sha256(), 0
        for match in self._ends.finditer(text):
            for position in (match.start(), match.end()):
                digest.update(text[done:position].encode("utf-8", "surrogatepass"))
                done = position
                yield position, digest.copy().digest()
