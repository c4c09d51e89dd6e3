"""The pure core of control: a state machine that takes events and returns actions, without clock, socket, task or
torch.

``machine`` is its entry: ``Control.handle`` calls ``apply`` (what an event changes in the state) and then ``decide``,
with ``launch`` (what is ordered next). ``run_state`` is the state of a run as data, whose encoding is the snapshot;
``unanswered_orders`` lists the orders that have no answer yet. The controller runs it in a real run, ``simulate`` in
virtual time, and the journal replays it.

Policies (how rounds are formed, how large groups are) are objects of the protocols in ``round_policy``; they come in by
constructor."""
