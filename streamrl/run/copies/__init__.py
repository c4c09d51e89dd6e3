"""Copies of a run's checkpoints in an object store: the right to write there (``epochs``), writing and removing copies
(``checkpoint_copies``), and fetching a copy (``fetch_checkpoint``)."""
