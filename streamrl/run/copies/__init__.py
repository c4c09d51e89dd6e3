"""Copies of a run's checkpoints in an object store: who may write there (``epochs``), what is there
(``checkpoint_copies``), and how one comes back (``fetched``)."""
