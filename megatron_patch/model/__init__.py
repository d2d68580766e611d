"""The mixed model: frozen MLA base layers with trainable DSA layers, built on megatron-core."""
