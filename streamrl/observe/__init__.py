"""What a run shows: telemetry, sinks, and below: metric definitions, reports of the controller, the terminal. Decides
nothing."""
