"""DSA mathematics on plain tensors, torch only: `reference.py` is the definition, `chunked.py` what trains, `rope.py` RoPE."""
