"""The coroutines of rollout, reward and training: each reads one stream and writes one."""
