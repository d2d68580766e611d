"""DSA mathematics on plain tensors, torch only: `reference.py` is the definition, `sparse.py` what trains on a CPU
where documents are long, `chunked.py` where they are short and on a GPU, `rope.py` RoPE."""
