"""The pure core of control. ``model`` is the state of a run as data: its encoding is the snapshot. ``apply`` is what an
event changes, ``decide`` (with ``launch``) what is to be done then, ``machine`` both together, ``pending`` what was
ordered and not answered. No clock, socket, task or torch.

Policies (how rounds are formed, how large groups are) are objects of the protocols in ``round_policy``; they come in by
constructor."""
