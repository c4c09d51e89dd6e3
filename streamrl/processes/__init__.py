"""Processes of a run on its hosts: how they are started, watched, ended, and started again. ``supervisor`` runs in the
process of the command and starts processes through a ``launcher``: ``local_launcher`` on this host, ``cluster`` on
many.
``run_role`` runs in each process, ``watchdog`` in the controller. No torch, no vLLM."""
