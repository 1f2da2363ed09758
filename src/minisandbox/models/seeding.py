"""Seeds that depend on nothing but what they are for, and models whose draws have such seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from minisandbox.models.protocol import Completion, Model, Request


def seed_of(*parts: object) -> int:
    """Return a number below 2**63 that depends on nothing but the parts' texts."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class SeededModel:
    """A model whose answers are drawn with a seed of the rollout and the turn, whatever else goes on.

    Attributes:
        model: it.
        seed: of the rollout.
    """

    model: Model
    seed: int

    @property
    def name(self) -> str:
        """The model's."""
        return self.model.name

    async def complete(self, request: Request) -> Completion:
        """As :meth:`.Model.complete`."""
        turn = sum(message.role == "assistant" for message in request.messages)
        sampling = replace(request.sampling, seed=seed_of(self.seed, turn))
        return await self.model.complete(replace(request, sampling=sampling))

    async def close(self) -> None:
        """Nothing: the model is its owner's."""
