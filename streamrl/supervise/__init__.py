"""Starting, watching and ending the processes of a run, and when they are started again; the watchdog; crash bundles.

It imports the kernel, the plan of a run (``plan``) and what a process reports; no torch, no vLLM.
"""
