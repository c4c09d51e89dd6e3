"""Commands that look at a running run and steer it over its control socket. It imports the messages of
``launch/steering``."""
