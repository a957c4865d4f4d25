"""Errors of the model layer.

PilotfishError
├── ModelError       a model cannot be loaded or cannot be served exactly
├── TextError        a tokenizer or chat template cannot do what was asked
└── BlockPoolError   the block pool was misused or its books do not balance (a bug)
"""

from pilotfish_broker.errors import PilotfishError

__all__ = ["BlockPoolError", "ModelError", "TextError"]


class ModelError(PilotfishError):
    """A model cannot be loaded or served; the message says what to do about it."""


class TextError(PilotfishError):
    """A text cannot be tokenized, or the model has no (working) chat template."""


class BlockPoolError(PilotfishError):
    """Reference counts, free list and block tables disagree. This is always a bug."""
