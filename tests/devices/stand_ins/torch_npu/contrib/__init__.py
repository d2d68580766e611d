"""As torch_npu has it."""
