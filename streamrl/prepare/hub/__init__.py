"""Names of the Hugging Face Hub in a recipe: resolved once, before anything is started, to folders of the cache, each
of one commit. ``resolution`` is called; it starts ``fetch``, the one process of a run that asks the Hub."""
