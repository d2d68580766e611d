"""Why does reinforcement learning go wrong? rl_*: reading a verl run's log, and naming its symptoms."""
