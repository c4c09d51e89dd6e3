"""What the controller measures: a record a step (``run_report``), trajectories to their end (``trajectory_stats``), the
trace for the simulator (``trajectory_trace``), what the run waits for, and alarms. Decides nothing.

Imports ``base``, ``control``, ``buffers``, ``evaluate``, ``journal`` and ``sync``."""
