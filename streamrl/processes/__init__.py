"""Children of a run on its hosts: started, watched, ended, and started again. ``supervisor`` runs in the process of the
command and starts children through a ``launcher``: ``local`` on this host, ``cluster`` on many. ``child`` and
``watchdog`` run in each child. No torch, no vLLM."""
