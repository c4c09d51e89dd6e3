"""Published objectives, one a file: formulas, values that a paper gives to the keys of ``[objective]``, own keys."""
