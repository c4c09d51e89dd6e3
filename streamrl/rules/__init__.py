"""What refuses a recipe, and what explains its keys: rules between fields, names of other systems, texts. Imports
``recipe`` and ``plan``; ``recipe.load`` calls ``rules.broken_rules`` and ``rules.foreign_answer`` by name."""
