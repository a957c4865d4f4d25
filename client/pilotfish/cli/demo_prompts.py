"""The prompts of `pilotfish demo`: of different kinds, since drafting pays differently for each."""

from __future__ import annotations

from collections.abc import Mapping

_STORY = (
    "The harbour of Lund was quiet before the storm. Fishermen carried their nets to the sheds, "
    "the ferry was tied up with a second rope, and the keeper of the lighthouse went up early to "
    "trim the lamp. By midnight the wind had torn two roofs away, but every boat was still afloat."
)

PROMPTS: Mapping[str, str] = {
    "question": "Why is the sky blue?",
    "summary": f"Summarise this text in one sentence:\n\n{_STORY}",
    "rewriting": f"Rewrite this text in the present tense and change nothing else:\n\n{_STORY}",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "list": "List the eight planets of the solar system in order, one a line.",
    "translation": "Translate into French: The train to Paris leaves at nine in the morning.",
    "extraction": f"Which people and things are named in this text? Give a list.\n\n{_STORY}",
    "letter": "Write a short, friendly letter that invites a neighbour to a garden party.",
    "explanation": "Explain to a child of ten what a lighthouse is good for.",
    "table": 'Write a JSON array of three objects with the keys "name", "legs" and "can_fly", '
    "for a dog, a sparrow and a spider.",
}
