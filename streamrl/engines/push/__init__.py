"""A weight push as one transaction over all engines (``weight_sync``), the hosts that it is relayed by
(``relay_tree``), and checks of the result beside the state hash (``verify``)."""
