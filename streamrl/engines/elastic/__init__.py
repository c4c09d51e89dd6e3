"""Engines that change while a run continues: freed late in a round (``freeing``), or exchanged between rounds for a set
of another shape (``sets``). Both decide without a clock and are used by the simulator, too; ``elastic_engines`` acts,
and ``hosts`` has the life of every engine."""
