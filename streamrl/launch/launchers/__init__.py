"""Ways to start the processes of a run, to see their ends and to end them: ``launcher`` is what the supervisor knows.
``local`` starts them on this host; ``cluster`` on many, through an ``agent`` on each, which ``ray_hosts`` starts.
What an end means for the run is in ``launch/supervise``. No torch, no vLLM; Ray only where a recipe asks for it."""
