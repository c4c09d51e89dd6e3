"""Processes of a run on many hosts: ``cluster_launcher`` is the launcher of the supervisor, with a ``host_daemon`` on
each host, which ``ray_hosts`` starts. No torch, no vLLM; Ray is imported only for a recipe with ``cluster.kind =
"ray"``."""
