"""The trainer's side of a push: versions, chunks, and the server that engines fetch from."""
