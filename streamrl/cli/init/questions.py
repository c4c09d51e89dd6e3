"""Questions of ``streamrl init`` on a terminal, for missing flags."""

from __future__ import annotations

from streamrl.base.errors import RecipeError
from streamrl.base.types import TextMapping


def choose(question: str, choices: TextMapping, free: str) -> str:
    """Return the name of the choice whose number or name is typed; Enter takes the first choice. ``free``: hint at
    other text that may be typed, which is returned unchanged. Raises ``RecipeError`` at the end of the input."""
    names = list(choices)
    width = max(map(len, choices))
    print(f"\n{question}")
    for number, (name, text) in enumerate(choices.items(), 1):
        print(f"  {number}  {name:<{width}}  {text}")
    print(f"  or {free}")
    while (answer := ask("choice [1]: ") or "1").isdigit():
        if 0 < int(answer) <= len(names):
            return names[int(answer) - 1]
        print(f"there is no {answer}: type 1 to {len(names)}")
    return answer


def ask(prompt: str) -> str:
    """Return the typed line, without white space at its ends. Raises ``RecipeError`` at the end of the input."""
    try:
        return input(prompt).strip()
    except EOFError:
        raise RecipeError("the input ended before the last answer: give --task and --model") from None
