"""DSA mathematics on plain tensors, torch only: `reference.py` is the definition, `rope.py` the rotary embeddings."""
