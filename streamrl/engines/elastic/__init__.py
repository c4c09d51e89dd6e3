"""Engines that change while a run continues. Engines may be freed late in a round (``freeing``), or exchanged between
rounds for another set (``engine_sets``); the simulator uses both choices, too. ``elastic_engines`` carries them out,
and
``engine_processes`` has the lifecycle of every engine process."""
