"""Completions that nothing is trained on: held-out runs, and rewards that are tried alone (``trial_*``).

Imports the kernel, ``prompts`` and ``vllm``.
"""
