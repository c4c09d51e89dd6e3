"""State of the trajectories in flight, in the controller's process: groups with sizes and states (``rollout_buffer``),
slots (``slots``), and tokens (``trajectory_store``)."""
