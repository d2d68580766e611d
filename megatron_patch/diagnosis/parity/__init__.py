"""Parity: the same tokens through the trainer and through a checkpoint, module by module, and which known fault explains a gap.

`records` is what one side did; `judge` is an independent implementation of every module, run on a side's own inputs, so
that a difference is the module's own and not its predecessors'; `suspects` runs it again with each known fault planted.
"""
