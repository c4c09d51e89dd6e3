"""Output on a terminal: lines of steps, tables, curves, in the processes of the commands."""
