"""Weights through an object store, for engines of another site: what a publisher puts there, and how it is fetched."""
