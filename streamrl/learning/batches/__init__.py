"""From groups to rows of packed tokens, their gradients, and passes without gradient."""
