"""A weight push as one transaction over all engines (``weight_sync``), and what checks the result beside the state hash
(``verify``)."""
