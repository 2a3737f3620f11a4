"""The chat format of Apertus: messages in normal form, the template that renders them, tokens and loss
masks."""

from apertus_model.chat.encoder import ChatEncoder, ChatError, Encoded
from apertus_model.chat.messages import ConversationError, normalise
from apertus_model.chat.template import CONTROL_TOKENS, END_OF_TURN, render, template_source

__all__ = [
    "CONTROL_TOKENS",
    "END_OF_TURN",
    "ChatEncoder",
    "ChatError",
    "ConversationError",
    "Encoded",
    "normalise",
    "render",
    "template_source",
]
