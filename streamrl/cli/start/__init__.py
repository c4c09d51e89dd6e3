"""``streamrl init``: a folder that trains as it is. ``tasks`` has the tasks and rows of the user's, ``templates`` the
files of each task, ``models`` what ``--model`` may name, ``questions`` what is asked on a terminal, ``folders`` the
writing. It imports files of the command line and ``recipe/rules``, which knows names of the Hub;
``learning/small_model`` makes models, as a program."""
