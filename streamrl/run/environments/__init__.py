"""Tools that a trajectory of several turns calls between them, as typed functions or classes of a user. Imports the
room's files, pretrained and rooms before it; no torch."""
