"""What tests are built from, by room. This page is what a contributor reads to write a test.

A test file stands in the folder of the room that it imports most (``tests/control`` for ``streamrl/control``), in a
wing below it where the room has one. ``runs`` has whole runs, ``oracle`` the walks of control, ``security`` the rules
of SECURITY.md, ``examples``, ``campaigns``, ``kernel`` and ``gpu`` those parts; tests of the tree itself stand beside
this folder. A name of a test has at most 60 characters, and its docstring is the sentence that must hold.

What a test begins with:

- ``files``: the checkout, ``examples/sort``, and files of JSON lines
- ``recipe``: ``small_recipe(section=...)``, which no rule has checked; ``load_recipe(SORT_RECIPE, ["key=value"])`` is
  one that rules have checked
- ``base``: a finished ``trajectory``, ids, clocks that a test sets (``SetClock``) or that advance by themselves
  (``InstantClock``)
- ``stages``: ``episodes_on(engine)`` samples trajectories without rewards and journal
- ``pretrained``: tokenizers of characters, and a model folder that can be read; ``hub``: a Hub on this host
- ``weights``: announcements, and bits that differ a little; ``processes``: whether a process lives
- ``observe``: metrics that the registry does not know

Worlds, where a test needs more than one part: ``oracle.control_world.World`` drives control by events, without a loop;
``tests.run.scripted_parts.SimulatedRun`` is a controller on simulated engines and virtual time;
``tests.simulate.worlds`` makes simulations; ``tests.weights.faulty_link`` a publisher and receivers over a link that
can fail; ``tests.processes.trials.Trial`` a supervisor over stand-ins. Fixtures of a folder are in its ``conftest.py``,
those of all tests in ``tests/conftest.py``. CONTRIBUTING.md says how tiers and forks work."""
