"""Tests of megatron_patch.diagnosis."""
