"""The reward runtime: the user's functions, run so that nothing they do becomes a wrong reward or a hang."""
