"""The reward ``judge``, for which a language model scores completions, and the run's own judge. ``reward`` and
``client`` run where the reward function runs, ``server``, ``gate`` and ``options`` in the judge's process, and ``link``
in the controller."""
