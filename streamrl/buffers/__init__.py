"""State of a run in flight: groups and their trajectories (``rollout_buffer``, sizes and states only), their slots
(``slots``), and their content (``trajectory_store``)."""
