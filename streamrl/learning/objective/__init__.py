"""Loss functions of a trainer rank: pure functions, with the papers that they are from."""
