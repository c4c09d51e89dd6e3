"""Table of the keys and values of TRL, verl, prime-rl, AReaL and vLLM, and their meaning in a recipe. Imports the files
of ``recipe`` alone."""
