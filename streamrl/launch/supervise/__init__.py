"""Starting, watching and ending the processes of a run, and when they are started again; the watchdog; crash bundles.
No torch, no vLLM."""
