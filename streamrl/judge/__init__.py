"""A language model that scores completions: the reward, and the run's own judge that answers it.

Reward side: ``reward``, ``client``. The judge's process: ``server``, ``gate``, ``options``. The controller: ``link``.
Imports the kernel, ``vllm``, ``plan`` and ``supervise``; nothing but the table of roles and of rewards names it.
"""
