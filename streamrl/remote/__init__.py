"""What reaches a run from outside: keys, who may connect over tcp, the control socket, processes started by hand."""
