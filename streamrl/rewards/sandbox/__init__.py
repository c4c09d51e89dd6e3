"""The reward ``code``, which runs a model's code against tests in a sandbox of namespaces, seccomp, Landlock and limits
(docs/rewards.md).

``reward`` is the reward function; ``cases``, ``asserts`` and ``values`` read tests and compare results outside of the
sandbox; ``sandbox`` talks to the ``zygote``, which forks a ``jail`` for each run. The files that the zygote loads
(``jail``, ``program``, ``values``, ``files``, ``seccomp``, ``syscalls``) import only the standard library. All other
files import ``base``, and ``reward`` imports the declarations of built-in rewards."""
