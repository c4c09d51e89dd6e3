"""Weights through an object store, for engines at another site: the objects that a publisher writes there."""
