"""Stages of a run: coroutines that sample, score and train.

The controller runs ``episodes`` (a coroutine for each trajectory, from its launch to its outcome), ``environment`` and
``reward``; ``training`` runs in each trainer rank."""
