"""What a model and a layout cost before anything is built: parameters, bytes per device. No torch, no megatron."""
