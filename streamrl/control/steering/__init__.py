"""Orders of users to a running run: the keys of a recipe that may change, and how control applies changes and orders.
It imports no other wing; ``policies.round_policies`` hands in the function that makes policies."""
