"""Telemetry and sinks of a run, and below: metric definitions, reports of the controller, the terminal. Decides
nothing."""
