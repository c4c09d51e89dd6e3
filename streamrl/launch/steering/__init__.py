"""Steering of a running run between its control socket and control: messages, checks of changed settings, both ends of
the conversation between parent and controller. It imports control's steering, recipe rules and ``processes``."""
