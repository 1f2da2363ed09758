"""A small engine on transformers, for a CPU or one GPU: it reports exactly the tokens that it samples."""

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
