"""Serve a transformers model on the CPU or one GPU, and report exactly the tokens that were read and sampled."""

from minisandbox.models.engine.engine import TransformersEngine
from minisandbox.models.engine.local import fetch_model, find_model, model_cache, open_local
from minisandbox.models.engine.recompute import recompute_logprobs
from minisandbox.models.engine.server import EngineServer

__all__ = [
    "EngineServer",
    "TransformersEngine",
    "fetch_model",
    "find_model",
    "model_cache",
    "open_local",
    "recompute_logprobs",
]
