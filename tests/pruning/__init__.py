"""Tests of expert pruning."""
