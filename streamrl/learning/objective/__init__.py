"""Loss functions: advantages, surrogates, off-policy corrections, the critic. Pure functions with their papers."""
