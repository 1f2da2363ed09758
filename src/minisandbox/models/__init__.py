"""Models: what agents ask for their next action, with the tokens that were read and sampled."""

from minisandbox.models.graph import TokenGraph, TokenRow
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

__all__ = [
    "Completion",
    "FinishReason",
    "Message",
    "Model",
    "Request",
    "Role",
    "Sampling",
    "TokenGraph",
    "TokenRow",
    "TokenUsage",
    "Tokens",
    "ToolCall",
]
