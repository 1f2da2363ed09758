"""vLLM as the engine of training, as far as it can be tested without a GPU: what TRL and vLLM are told, and when."""

from __future__ import annotations

import asyncio
import inspect
import sys
from array import array
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.tiny_model import tiny_model, tiny_tokenizer
from tests.unit.toy_setting import ToySetting, toy_config

from minisandbox.errors import InvalidValue, MissingExtra, ModelUnavailable
from minisandbox.models import Message, Request, Sampling, TokenGraph
from minisandbox.models.engine import TransformersEngine, recompute_logprobs
from minisandbox.models.engine.decoding import Decoder
from minisandbox.models.engine.row import Row
from minisandbox.models.engine.vllm import VllmDecoder
from minisandbox.models.served import ServerPolicy
from minisandbox.train import engines
from minisandbox.train.config import RlConfig, Vllm
from minisandbox.train.engines import (
    check_engine,
    in_precision,
    open_engine,
    vllm_arguments,
)
from minisandbox.train.rl import train_rl

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]


class Engine:
    """What vLLM's ``LLMEngine`` offers, over our own decoding loop."""

    def __init__(self, model: Any, ends: frozenset[int]) -> None:
        self.decoder = Decoder(model, ends, cache_bytes=0)
        self.rows: dict[str, Row] = {}
        self.parameters: list[Any] = []

    def add_request(self, name: str, prompt: Mapping[str, list[int]], parameters: Any) -> None:
        assert all(type(token) is int for token in prompt["prompt_token_ids"])
        assert name not in self.rows
        self.parameters.append(parameters)
        drawn = Sampling(temperature=parameters.temperature, seed=parameters.seed)
        self.rows[name] = Row(array("i", prompt["prompt_token_ids"]), drawn, parameters.max_tokens)
        self.decoder.admit(self.rows[name])

    def step(self) -> list[Any]:
        ended = self.decoder.step()
        found = []
        for name, row in self.rows.items():
            logprobs = [{t: SimpleNamespace(logprob=p)} for t, p in zip(row.sampled, row.logprobs, strict=True)]
            one = SimpleNamespace(token_ids=row.sampled.tolist(), logprobs=logprobs, finish_reason=row.finish)
            whole = SimpleNamespace(request_id=name, finished=row in ended, outputs=[one], num_cached_tokens=None)
            found.append(whole)
        self.rows = {name: row for name, row in self.rows.items() if row not in ended}
        return found

    def abort_request(self, names: list[str]) -> None:
        self.decoder.drop([self.rows.pop(name) for name in names])


@pytest.fixture
def config(tmp_path: Path) -> RlConfig:
    return replace(toy_config(tmp_path, tmp_path / "run"), engine="vllm", deterministic=False, device="auto")


def test_a_conversation_by_vllm_is_exact_to_the_token() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    made: list[Engine] = []

    def decoder(ends: frozenset[int]) -> VllmDecoder:
        made.append(Engine(model, ends))
        return VllmDecoder(made[0], ends, parameters=SimpleNamespace)

    engine, graph = TransformersEngine(model, tokenizer, decoder=decoder), TokenGraph()

    async def converse() -> None:
        messages = [Message("user", "the tests fail")]
        for turn in range(3):
            sampling = Sampling(temperature=0.7, max_tokens=5, seed=turn)
            answer = await engine.complete(Request(tuple(messages), sampling=sampling, session="a"))
            assert answer.tokens is not None
            graph.add(answer.tokens)
            messages += [answer.message, Message("user", "and now")]
        await engine.close()

    asyncio.run(converse())
    (row,) = graph.rows()
    again = recompute_logprobs(model, row, temperature=0.7)
    assert max(abs(a - b) for a, b, m in zip(row.logprobs, again, row.mask, strict=True) if m) < 1e-4
    first = made[0].parameters[0]
    assert (first.max_tokens, first.logprobs, first.seed, first.detokenize) == (5, 0, 0, False)
    assert first.stop_token_ids == [1]


def test_what_is_cancelled_or_dropped_is_aborted_there() -> None:
    engine = Engine(tiny_model(400), frozenset({1}))
    decoder = VllmDecoder(engine, frozenset({1}), parameters=SimpleNamespace)
    rows = [Row(array("i", [5, 6]), Sampling(seed=n, stop=("x",) * n), 50) for n in range(2)]
    for row in rows:
        decoder.admit(row)
    assert engine.parameters[1].stop == ["x"]
    assert engine.parameters[1].include_stop_str_in_output is True
    decoder.drop(rows[:1])
    assert [row.sampling.seed for row in engine.rows.values()] == [1]
    decoder.forget()
    assert not engine.rows
    assert not decoder.rows
    assert not rows[0].sampled


def test_trl_is_told_of_vllm(config: RlConfig) -> None:
    pytest.importorskip("trl")
    from trl.generation.vllm_generation import VLLMGeneration  # noqa: PLC0415 - an extra

    policy = replace(config.policy, context=20480)
    colocated = vllm_arguments(replace(config, policy=policy, vllm=Vllm(memory=0.4)))
    served = vllm_arguments(replace(config, vllm=Vllm(mode="server", url="http://there:8000", group_port=5)))
    assert {*colocated, *served} <= inspect.signature(VLLMGeneration).parameters.keys()
    assert colocated == {"mode": "colocate", "gpu_memory_utilization": 0.4, "max_model_length": 20480}
    assert served == {"mode": "server", "server_base_url": "http://there:8000", "group_port": 5}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_vllm_is_started_in_the_precision_of_the_training(
    config: RlConfig, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    from trl.generation import vllm_generation  # noqa: PLC0415 - an extra

    monkeypatch.setattr(vllm_generation, "LLM", SimpleNamespace, raising=False)
    config = replace(config, precision=precision)
    with in_precision(config):
        started = vllm_generation.LLM(model="x")
    assert (started.model, started.dtype) == ("x", precision)
    assert vllm_generation.LLM is SimpleNamespace
    with in_precision(replace(config, vllm=Vllm(mode="server", url="http://localhost:1"))):
        assert vllm_generation.LLM is SimpleNamespace


@pytest.mark.parametrize(
    ("platform", "cuda", "device", "mode", "said"),
    [
        ("cuda", True, "auto", "colocate", None),
        ("cuda", True, "auto", "server", None),
        ("cuda", True, "cpu", "colocate", "built for cuda"),
        ("cuda", False, "auto", "colocate", "built for cuda"),
        ("cuda", False, "auto", "server", "over NCCL"),
        ("cpu", False, "auto", "colocate", None),
        ("cpu", False, "cpu", "colocate", None),
        ("cpu", False, "cpu", "server", "over NCCL"),
        (None, True, "auto", "server", "in the trainer's environment"),
    ],
)
def test_what_vllm_cannot_do_is_refused_before_anything_begins(
    config: RlConfig, monkeypatch: pytest.MonkeyPatch, platform: str | None, cuda: bool, device: str, mode: str,
    said: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(engines, "_vllm_platform", lambda: platform)
    monkeypatch.setattr(engines, "_has_cuda", lambda: cuda)
    config = replace(config, device=device, vllm=Vllm(mode=mode))
    with pytest.raises(InvalidValue, match="deterministic"):
        check_engine(replace(config, deterministic=True))
    if said is None:
        check_engine(config)
        return
    with pytest.raises((InvalidValue, MissingExtra), match=said):
        check_engine(config)


def test_a_missing_vllm_is_named_before_anything_begins(config: RlConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="the extra [train] is not installed")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"engine=vllm needs the packages vllm and trl.*pip install 'trl\[vllm\]'"):
        train_rl(config, ToySetting())
    assert not Path(config.out).exists()


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As much of a learner as engines use, and a vLLM that counts how often it gets weights."""
    tokenizer, synced = tiny_tokenizer(), []
    generation = SimpleNamespace(llm=SimpleNamespace(llm_engine=None), sync_weights=lambda: synced.append(1))
    monkeypatch.setattr(engines, "_open_vllm", lambda *_: generation)
    return SimpleNamespace(sampler=tiny_model(len(tokenizer)), tokenizer=tokenizer, synced=synced)


@pytest.mark.parametrize("settings", [Vllm(), Vllm(mode="server", url="http://localhost:1")])
def test_vllm_has_the_weights_of_each_step_once(config: RlConfig, learner: Any, settings: Vllm) -> None:
    """An evaluation comes before a step's rollouts."""
    engine = open_engine(learner, replace(config, vllm=settings))
    learner.sampler.train()
    for version, count in ((0, 1), (0, 1), (1, 2)):
        with engine.drawing(version):
            assert getattr(engine.model, "version", version) == version
        assert learner.sampler.training
        assert len(learner.synced) == count
    asyncio.run(engine.close())
    assert isinstance(engine.model, TransformersEngine if settings.mode == "colocate" else ServerPolicy)


def test_an_interrupted_step_waits_for_no_request(config: RlConfig, learner: Any) -> None:
    engine = open_engine(learner, replace(config, engine="transformers", policy=replace(config.policy, context=None)))
    assert isinstance(engine.model, TransformersEngine)
    decoder = engine.model._decoder
    decoder._ends = frozenset()  # type: ignore[attr-defined] # responses without an end

    rows: list[Row] = []

    async def interrupt() -> None:
        with engine.drawing(0):
            tasks = [asyncio.ensure_future(engine.model.complete(Request((Message("user", "?"),)))) for _ in range(3)]
            while len(decoder.rows) < len(tasks):
                await asyncio.sleep(0.01)
            rows.extend(decoder.rows)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupt())
    assert rows
    assert all(row.finish is None for row in rows)  # abandoned, not awaited
    asyncio.run(engine.close())


def test_the_server_s_policy_has_the_trainer_s_tokenizer(config: RlConfig, learner: Any) -> None:
    tokenizer = learner.tokenizer
    learner.sampler.name_or_path = "models/policy"
    engine = open_engine(learner, replace(config, vllm=Vllm(mode="server", url="http://localhost:1/")))
    assert isinstance(engine.model, ServerPolicy)
    assert engine.model.name == "models/policy"
    assert engine.model.renderer.encode("the tests") == array("i", tokenizer("the tests")["input_ids"])
    client = engine.model.client

    async def ask() -> None:
        with pytest.raises(ModelUnavailable):
            await asyncio.wait_for(engine.model.complete(Request((Message("user", "?"),))), 30)
        await engine.close()

    client._retries = 0
    asyncio.run(ask())
