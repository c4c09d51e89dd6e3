"""Published objectives, one file each: formulas, the paper's values of the keys of ``[objective]``, and further
keys."""
