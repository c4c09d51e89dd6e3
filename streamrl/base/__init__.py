"""What everybody uses: types, messages between processes, errors, seeds, files written atomically, small async tools.
Imports msgspec, numpy, anyio and ``recipe.rewards`` only."""
