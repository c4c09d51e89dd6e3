"""Built-in rewards: ``catalog`` lists them, the other files define them."""
