"""Everything that shows a run: the sinks and the metrics socket, the measurements of the controller (``report``), the
terminal, the dashboard, ``streamrl top`` and the trackers. No decision about a run is made in this package."""
