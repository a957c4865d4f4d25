"""Errors of the model layer.

    PilotModelError
    ├── ModelError       a model cannot be loaded or cannot be served exactly
    ├── TextError        a tokenizer or chat template cannot do what was asked
    └── BlockPoolError   the block pool was misused or its books do not balance (a bug)
"""

__all__ = ["BlockPoolError", "ModelError", "PilotModelError", "TextError"]


class PilotModelError(Exception):
    """Base class of everything that the model layer raises on purpose."""


class ModelError(PilotModelError):
    """A model cannot be loaded or served; the message says what to do about it."""


class TextError(PilotModelError):
    """A text cannot be tokenized, or the model has no (working) chat template."""


class BlockPoolError(PilotModelError):
    """Reference counts, free list and block tables disagree. This is always a bug."""
