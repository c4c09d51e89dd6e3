"""The controller, which carries out the actions of control, with trainer ranks, checkpoints and metrics of a step.
``launch`` makes all other parts that the controller needs, and passes them to its constructor."""
