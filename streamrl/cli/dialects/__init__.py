"""Ways in for users of other trainers: forms of a command line (``command_line``), files of settings
(``setting_files``), scripts of TRL that are run (``recorded_script``) and trainers with TRL's constructors
(``trl_trainers``, shown by ``streamrl.trl``). ``translation`` makes recipes. It imports ``recipe/dialects``."""
