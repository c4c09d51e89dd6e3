"""Reward functions, environments, and other code of users."""

from __future__ import annotations

from campaigns.newcomer_mistakes.mistake import Mistake, each, edited, recipe, written

FUNCTION = 'function = "reward.py:sorted_trace"'
NO_EVALUATION = edited("recipe.toml", '[evaluation]\nprompts = "held_out.jsonl"\n', "")
ENVIRONMENT = "[environment]\nmax_turns = 2\nmax_tokens = 128\n"


def _named(new: str, *said: str) -> Mistake:
    """The reward as the recipe names it."""
    return recipe("reward.py:sorted_trace", new, *said)


def _reward(text: str, *said: str, options: str = "") -> Mistake:
    """A file of the reward with this text, for a recipe without held-out prompts."""
    change = each(written("reward.py", text), NO_EVALUATION, edited("recipe.toml", FUNCTION, f"{FUNCTION}\n{options}"))
    return Mistake(change, said)


def _value(body: str, *said: str) -> Mistake:
    """A reward whose coroutine has this body."""
    text = f"async def sorted_trace(completion, **columns):\n    {body}\n"
    return _reward(text, 'rewards: the reward "sorted_trace" fails', *said, "correct it; `streamrl reward test`")


def _environment(key: str, text: str, *said: str) -> Mistake:
    """An environment with this key, and a file game.py of this text."""
    return Mistake(each(written("game.py", text), edited("recipe.toml", "", f"{ENVIRONMENT}{key}\n")), said)


MISTAKES: dict[str, Mistake] = {
    "a file that is not there": _named("rewards.py:right", "rewards.0.function:", "rewards.py", "correct the path"),
    "a function that is not there": _named("reward.py:sort", "rewards.0.function:", 'no "sort"', "correct the name"),
    "a file without a function": _named("reward.py", "recipe.toml:12: rewards.0.function:", "path/to/file.py:function"),
    "a function without a file": _named("sorted_trace", "rewards.0.function:", '"sorted_trace"', "path/to/file.py"),
    "a module that is not installed": _named("my_rewards:score", "rewards.0.function:", '"my_rewards"', "install it"),
    "a built-in that is none": _named("maths", "rewards.0.function:", '"maths"', "write one of code"),
    "an error of syntax": _reward(
        "async def sorted_trace(completion\n    return 1\n", "rewards.0.function:", "reward.py, line 1", "correct it"
    ),
    "a package that is not installed": _reward(
        "import no_such_package\n", "rewards.0.function:", "'no_such_package' (reward.py:1)", "install what it needs"
    ),
    "an error at import": _reward("raise RuntimeError('no key')\n", "rewards.0.function:", "no key", "correct it"),
    "sys.exit at import": _reward("import sys\nsys.exit(1)\n", "rewards.0.function:", "reward.py:2", "correct it"),
    "no function but a value": _reward("sorted_trace = 1.0\n", "rewards.0.function:", "float", "name a function"),
    "a function without a completion": _reward(
        "async def sorted_trace():\n    return 1.0\n", "rewards.0.function:", "no completion", "must be positional"
    ),
    "a misspelt column": _reward(
        "async def sorted_trace(completion, *, anwser):\n    return 1.0\n",
        "prompts.train:", "line 1", '"anwser"', "sorted_trace", "add it",
    ),
    "a text for a reward": _value("return 'good'", "returned a str"),
    "no return": _value("pass", "None"),
    "NaN for a reward": _value("return float('nan')", "nan"),
    "a list for a reward": _value("return [1.0]", "returned a list"),
    "an exception": _value("return 1 / 0", "ZeroDivisionError", "reward.py:2"),
    "a missing key": _value("return columns['gold']", "KeyError", "reward.py:2"),
    "a time limit of none": _named(
        'reward.py:sorted_trace"\ntimeout_s = 0 #"', "recipe.toml:13: rewards.0.timeout_s: 0", "a number > 0"
    ),
    "a weight in words": recipe(
        FUNCTION, f'{FUNCTION}\nweight = "high"', "recipe.toml:13: rewards.0.weight:", '"high"', "a number"
    ),
    "an option that it does not take": _reward(
        "async def sorted_trace(completion):\n    return 1.0\n",
        "rewards.0.function:", 'no option "strictness"', "correct rewards.options",
        options="options = { strictness = 3 }",
    ),
    "two of one name": recipe(
        FUNCTION, f"{FUNCTION}\n[[rewards]]\n{FUNCTION}", "recipe.toml:14:", '"sorted_trace"', "another name"
    ),
    "no weight at all": recipe(FUNCTION, f"{FUNCTION}\nweight = 0", "recipe.toml:11: rewards:", "not 0"),
    "the reward of no environment": _named("environment", "recipe.toml:12:", '"environment"', "add [environment]"),
    "a judge without a model": _named("judge", "recipe.toml:11: rewards.0.options:", "nobody to ask", "set endpoint"),
    "a game that is not there": recipe(
        "", f'{ENVIRONMENT}env = "games.py:Game"\n', "environment:", "games.py", "correct the path"
    ),
    "a class that is not there": _environment(
        'env = "game.py:Game"', "class Other:\n    pass\n", "environment:", 'no "Game" (it has Other)',
        "correct the name"
    ),
    "a game without a method": _environment(
        'env = "game.py:Game"', "class Game:\n    def reset(self): pass\n", "environment.env:",
        "has no step", "name a class"
    ),
    "an error in the syntax of a game": _environment(
        'env = "game.py:Game"', "class Game\n", "environment:", "game.py, line 1", "correct it"
    ),
    "an episode that is no coroutine": _environment(
        'episode = "game.py:play"', "def play(model): return 1\n", "environment.episode:", "async def episode"
    ),
    "an environment and tools": _environment(
        'env = "game.py:Game"\ntools = ["game.py:search"]', "class Game: pass\n",
        "environment: has env and tools", "remove"
    ),
    "turns without an environment": recipe(
        "", "[environment]\nmax_turns = 3\n", "recipe.toml:30: environment.max_turns: 3", "name one, or remove it"
    ),
    "an agent as one text": recipe(
        "", '[environment]\nagent = "python agent.py"\n', "recipe.toml:30:", '"python agent.py"', "a list of strings"
    ),
    "an observer that is not there": recipe(
        "steps = 2", 'steps = 2\nadvanced = { observers = ["watch.py:Mine"] }', "observers:", "watch.py",
        "correct the path"
    ),
    "rounds that are not there": recipe(
        "group_size = 4", 'rounds = "custom"\npolicy = "rounds.py:Mine"', "rollout.policy:", "rounds.py",
        "correct the path"
    ),
}  # fmt: skip
