"""Batches: groups become rows of packed tokens, gradients, and passes without gradient."""
