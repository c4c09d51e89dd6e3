"""Types, messages between processes, errors, seeds, atomic files and small async tools, which all rooms and all
processes use.

docs/adr/0013-rooms.md lists the rooms in order, and ``lint/house.py`` checks it: a room imports only earlier rooms, and
its files import no folder inside of a room (a wing). ``base`` is the first room and imports msgspec, numpy and anyio
only."""
