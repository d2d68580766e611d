"""The training loop, thin, on megatron-core: schedules, DDP, (distributed) optimizer, LR scheduler."""
