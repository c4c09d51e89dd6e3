"""Keys and values of TRL, verl, prime-rl, AReaL and vLLM: one table, and the answers out of it. It imports the files of
``recipe`` alone."""
