"""Upcycle DeepSeek-V2-Lite with DSA layers, prune experts, and prove that the small model stands for the big one."""

__version__ = "0.1.0"
