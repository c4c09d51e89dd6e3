"""The command line: one file for each command. It may import every other room.

A command is a ``command.Command``: a frozen struct whose fields are its arguments, with their help at the field
(``Annotated[type, Argument("help")]``), and a method ``run`` that runs it and returns the exit code. To add one, write
``streamrl/cli/WING/NAME.py`` with such a class and give it a line in ``main.COMMANDS``. ``main`` imports only the
module of the requested command, so that ``streamrl --help`` is quick; a command can import its modules at the top.

The computations of a command belong to the room of its subject; this room only has its input and output."""
