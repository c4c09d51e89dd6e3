"""``streamrl launch``: text that starts Ray on the hosts of Slurm, Kubernetes or ssh and a run on them, and the program
of each host."""
