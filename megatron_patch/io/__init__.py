"""Files: safetensors read one tensor at a time, atomic publishing, hashes. No megatron, no transformers."""
