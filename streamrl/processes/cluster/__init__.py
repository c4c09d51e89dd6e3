"""Processes of a run on many hosts: ``cluster`` is the launcher that the supervisor is given, with an ``agent`` on each
host, which ``ray_hosts`` starts. No torch, no vLLM; Ray only where a recipe asks for it."""
