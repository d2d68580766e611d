"""Expert pruning: observe routing, plan, apply, verify. torch, safetensors and transformers; no megatron."""
