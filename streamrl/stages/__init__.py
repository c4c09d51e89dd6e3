"""Trajectories from their launch to their outcome (a coroutine each), their rewards, and the coroutine of training."""
