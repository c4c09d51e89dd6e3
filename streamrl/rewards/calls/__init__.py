"""The reward worker (``worker``): loading of its functions (``loading``, ``reward_set``) and their calls. Every call
ends, whatever the function does, and a function that misbehaves fails only the call in progress.

``trusted`` calls functions that the recipe trusts, on the worker's own loop. ``pool`` calls all other functions, in
call processes that the ``fork_server`` forks and kills; ``process`` is the code of a call process, and ``frames`` has
the messages between worker, fork server and call processes. The code uses anyio, except where coroutines of users run:
asyncio runs them."""
