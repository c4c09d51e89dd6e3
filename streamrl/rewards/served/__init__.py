"""Models that the run serves beside the policy, judge and teacher. ``client`` runs where questions are asked,
``server``, ``gate`` and ``options`` in the process of the model, and ``link`` in the controller."""
