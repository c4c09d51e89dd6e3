"""``streamrl init``: writes a folder that can be trained at once. ``tasks`` has the tasks and reads the user's rows,
``templates`` has the files of each task, ``start_models`` the values of ``--model``, ``questions`` the questions on a
terminal, ``folders`` writes the files. Imports files of the command line and ``recipe/rules``, which knows names of the
Hub; ``learning/small_model`` makes models, as a program in a child process."""
