"""Runs a model's code against tests: namespaces, seccomp, Landlock and limits around it (docs/rewards_code.md).

``reward`` is the reward; ``cases``, ``asserts`` and ``values`` say what a test is and compare outside; ``sandbox``
talks to the ``zygote``, which forks a ``jail`` for each run. What the zygote loads (``jail``, ``program``, ``values``,
``files``, ``seccomp``, ``syscalls``) imports only the standard library. It imports ``base``; ``reward`` also what every
built-in reward is made of."""
