"""A language model that scores completions: the reward, and the run's own judge that answers it. Reward side:
``reward``, ``client``. The judge's process: ``server``, ``gate``, ``options``. The controller: ``link``."""
