"""What a run has in flight: groups and their trajectories (``rollout_buffer``, sizes and states only), the slots that
they use (``slots``), and the content behind them (``trajectory_store``)."""
