"""Hostile messages, rewards and surroundings against real runs."""
