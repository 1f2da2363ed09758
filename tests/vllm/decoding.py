"""Conversations by vLLM's engine in this process: ``python -m tests.vllm.decoding MODEL ROWS``.

A program of its own: vLLM leaves threads and a process group behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from minisandbox.models import Message, Request, Sampling, TokenGraph
from minisandbox.models.engine import TransformersEngine

CONVERSATIONS = 8
TURNS = 3
TEMPERATURE = 0.7


def main() -> None:
    """Write a JSON line for each row of tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - heavy
    from vllm import LLM  # noqa: PLC0415 - the same

    from minisandbox.models.engine.vllm import VllmDecoder  # noqa: PLC0415 - the same

    place, out = sys.argv[1], Path(sys.argv[2])
    llm = LLM(
        model=place, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=16,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(place, dtype="float32"), AutoTokenizer.from_pretrained(place),
        decoder=lambda ends: VllmDecoder(llm.llm_engine, ends),
    )  # fmt: skip
    graphs = asyncio.run(converse(engine))
    with out.open("w", encoding="utf-8") as file:
        for number, graph in enumerate(graphs):
            for row in graph.rows():
                found = {"ids": [*row.ids], "logprobs": [*row.logprobs], "mask": [*row.mask], "turns": row.turns}
                file.write(json.dumps({"conversation": number, **found}) + "\n")


async def converse(engine: TransformersEngine) -> list[TokenGraph]:
    """Hold all conversations at once."""
    graphs = [TokenGraph() for _ in range(CONVERSATIONS)]

    async def one(number: int) -> None:
        messages = [Message("user", f"the tests of module {number} fail")]
        for _ in range(TURNS):
            sampling = Sampling(temperature=TEMPERATURE, max_tokens=24)
            answer = await engine.complete(Request(tuple(messages), sampling=sampling, session=str(number)))
            assert answer.tokens is not None
            graphs[number].add(answer.tokens)
            messages += [answer.message, Message("user", "and now")]

    await asyncio.gather(*map(one, range(CONVERSATIONS)))
    await engine.close()
    return graphs


if __name__ == "__main__":
    main()
