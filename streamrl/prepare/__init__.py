"""May this run begin, and with what: memory, GPUs, checks of the recipe, of files and of the machine, and the words of
the dry run. Commands call it before anything is started. Imports any room before it, no process of a run."""
