"""Where torch.distributed, RNG and megatron-core are made to run: the only place that knows cpu, cuda or npu."""
