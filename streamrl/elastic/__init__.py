"""Engines that change while a run goes on: freed late in a round (``freeing``), or exchanged between rounds for a set
of another shape (``sets``). Both decide without a clock and are used by the simulator, too; ``elastic_engines`` acts.
Imports ``engines``, ``sync``, and ``supervise`` for the processes."""
