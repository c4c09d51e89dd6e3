"""Commands that inspect a running run and steer it over its control socket, with the messages of
``launch/steering``."""
