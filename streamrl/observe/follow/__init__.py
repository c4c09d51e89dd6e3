"""Reading the files of a run while it goes on, or after it ended or was killed: lines from a cursor on, across
rotation, and which files there are. Imports of other wings ``run/journal`` alone."""
