"""Reproducible seeds, and models that sample with them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from minisandbox.models.protocol import Completion, Model, Request


def seed_of(*parts: object) -> int:
    """Return a number below 2**63 that depends only on the texts of the parts."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class SeededModel:
    """A model that samples each response with a seed derived from the rollout and the turn.

    Attributes:
        model: the model.
        seed: the rollout's seed.
    """

    model: Model
    seed: int

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model.name

    async def complete(self, request: Request) -> Completion:
        """Complete a conversation (:meth:`.Model.complete`)."""
        turn = sum(message.role == "assistant" for message in request.messages)
        sampling = replace(request.sampling, seed=seed_of(self.seed, turn))
        return await self.model.complete(replace(request, sampling=sampling))

    async def close(self) -> None:
        """Do nothing: the owner closes the model."""
