"""A whole deployment as children of one process: Valkey, verify workers, draft workers.

Whatever ends the process ends its children: see child.py.
"""

from pilotfish.embedded.stack import EmbeddedStack, StackPlan

__all__ = ["EmbeddedStack", "StackPlan"]
