"""What MindSpeed's adaptor does at import, as far as it concerns a caller: it takes every flag of sys.argv, untyped, into each
TransformerConfig, and patches megatron-core."""

import os
import sys

from torch_npu import record
from torch_npu.contrib import transfer_to_npu  # noqa: F401

MODE = os.environ.get("STAND_IN", "")
core_before = any(name == "megatron.core" or name.startswith("megatron.core.") for name in sys.modules)
record.note(f"adaptor argv={len(sys.argv)} core_before={core_before}")
if MODE == "needs_training":
    import megatron.training  # noqa: F401
if MODE == "needs_package":
    import a_package_that_nobody_has  # noqa: F401

FULL_ARGS: dict[str, object] = {}
words = sys.argv[1:]
for i, word in enumerate(words):
    if word.startswith("--"):
        value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
        FULL_ARGS[word[2:].replace("-", "_")] = value

import megatron.core.transformer.transformer_config as configs  # noqa: E402

original = configs.TransformerConfig.__post_init__


def post_init(self):
    for name, value in FULL_ARGS.items():
        setattr(self, name, value)
    original(self)


configs.TransformerConfig.__post_init__ = post_init


def repatch(args):
    if MODE == "namespace":
        args = vars(args)
    if MODE == "old_repatch":
        raise TypeError("repatch() takes 0 positional arguments but 1 was given")
    import megatron.core.transformer.attention as attention

    attention.HAVE_TE = True  # what was patched is taken back and made anew, a mend of ours with it
    record.note(f"repatch argv={len(sys.argv)} " + " ".join(f"{name}={type(value).__name__}:{value}" for name, value in sorted(args.items())))
