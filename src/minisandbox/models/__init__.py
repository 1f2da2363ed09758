"""Complete an agent's conversation with a language model, and report the token ids of prompt and response."""

from minisandbox.models.client import Gate, OpenAIModel
from minisandbox.models.graph import TokenGraph, TokenRow
from minisandbox.models.http import Timeouts
from minisandbox.models.metering import Budget, Meter, Prices
from minisandbox.models.options import ModelOptions, open_model
from minisandbox.models.protocol import (
    Completion,
    FinishReason,
    Message,
    Model,
    Request,
    Role,
    Sampling,
    Tokens,
    TokenUsage,
    ToolCall,
)
from minisandbox.models.scripted import Script, ScriptedModel

__all__ = [
    "Budget",
    "Completion",
    "FinishReason",
    "Gate",
    "Message",
    "Meter",
    "Model",
    "ModelOptions",
    "OpenAIModel",
    "Prices",
    "Request",
    "Role",
    "Sampling",
    "Script",
    "ScriptedModel",
    "Timeouts",
    "TokenGraph",
    "TokenRow",
    "TokenUsage",
    "Tokens",
    "ToolCall",
    "open_model",
]
