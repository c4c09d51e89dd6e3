"""Measurements in the process of the controller: metrics of each step (``run_report``), trajectories from launch to end
(``trajectory_stats``), the trace for the simulator and the dashboard (``trajectory_trace``), and alarms. Nothing here
decides what the run does."""
