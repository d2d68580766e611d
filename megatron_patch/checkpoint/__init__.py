"""Weights on disk: the one name mapping, loading a base, what a training run saves, export and its check."""
