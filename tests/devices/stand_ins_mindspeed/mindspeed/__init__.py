"""Stands for MindSpeed, branch core_r0.16.0."""
