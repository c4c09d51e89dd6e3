"""Measurements of the controller: a record a step (``run_report``), trajectories to their end (``trajectory_stats``),
the trace for the simulator (``trajectory_trace``), and alarms. Decides nothing."""
