"""The command line: a file a command, which may import everything.

A command is a ``command.Command``: a frozen struct whose fields are its arguments, with their help at the field
(``Annotated[type, Argument("help")]``), and a method ``run`` that does it and returns the exit code. To add one, write
``streamrl/cli/WING/NAME.py`` with such a class and give it a line in ``main.COMMANDS``. Only the module of the command
that was asked for is imported, so that ``streamrl --help`` is quick: import what you need at the top of the file.

What a command computes belongs to the room that it is about; here is only what it reads and prints."""
