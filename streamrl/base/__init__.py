"""Types, messages between processes, errors, seeds, files written atomically, small async tools: what all rooms use.

The rooms stand in one order, which docs/adr/0013-rooms.md has and ``lint/house.py`` checks: a room imports only rooms
before it, its files import no folder of its own or of another room (a wing). ``base`` is the first: msgspec, numpy and
anyio only."""
