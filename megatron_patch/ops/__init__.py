"""DSA mathematics on plain tensors, torch only: `reference.py` is the definition, `sparse.py` what trains on a CPU,
`chunked.py` on a GPU, `rope.py` RoPE."""
