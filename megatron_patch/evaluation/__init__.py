"""Scores of a model beside its base: exact-answer tasks, perplexity, and what its DSA layers contribute. No megatron."""
