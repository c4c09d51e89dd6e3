"""The reward worker: its functions (``loading``, ``reward_set``) and their calls. Every call ends, whatever the
function does, and only the call in progress pays for it.

``trusted``: functions that the recipe trusts, on the worker's own loop. ``pool``: all others, in processes that a
``fork_server`` forks and kills; ``process`` runs in them, and ``frames`` is what they and the pool send each other.
anyio, but where coroutines of users run: these are asyncio's."""
