"""The loss over a large vocabulary in chunks of tokens, so that the logits of a batch never exist at once.

A batch of 4,096 tokens has 1.7 GB of fp32 logits over V2-Lite's 102,400 words, and a gradient of the same size. Here each chunk's
logits live until its loss and its gradient with respect to the hidden states are known. The latter can be had in the forward pass
because the head is frozen and every token has a loss of its own: the gradient of the total is that of each token, times what
arrives for that token in the backward pass. Idea: cut cross-entropy (Wijmans et al., arXiv 2411.09009), without its kernel.

Shape letters: T tokens, D hidden, V words of this rank, C tokens of a chunk.
"""

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 64 << 20  # of fp32 logits; the matrix products are as fast as with all tokens at once
LEAST_CHUNK = 16


class UpcycledModel(GPTModel):
    """megatron-core's GPT whose loss goes through `head_loss` while the head is frozen; logits are as they were."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.embedding.register_forward_hook(lambda _module, _args, hidden: _natural_strides(hidden))

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None = None, **others) -> Tensor:
        weight = self.output_layer.weight if self.post_process else None
        if labels is None or weight is None or weight.requires_grad:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **others)
        group = self.output_layer.tp_group
        losses = head_loss(hidden_states.squeeze(1), weight, labels.flatten(), group if group.size() > 1 else None)
        return losses[None]


def _natural_strides(hidden: Tensor) -> Tensor:
    """[T, 1, D] as a contiguous tensor has it; the embedding hands on a transposed [1, T, D], whose middle stride is T * D.

    No element lies elsewhere for it, but oneDNN does not know: it takes 3 times as long for the first linear map in fp32, and
    430 times, with a gigabyte of scratch memory, in bf16 (512 tokens, 2,048 to 576, torch 2.13, one thread of a CPU with AVX-512).
    """
    return hidden.squeeze(1).unsqueeze(1)


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None = None, chunk: int | None = None
) -> Tensor:
    """Cross entropy of each token, in nats.

    Args:
        hidden: [T, D]; gets a gradient.
        weight: [V, D], the head's; with a group, this rank's rows of it, in rank order. Frozen.
        labels: int64 [T], words of the whole vocabulary.
        group: ranks that share the vocabulary.
        chunk: tokens at once; None: as many as `CHUNK_BYTES` of logits allow.

    Returns:
        fp32 [T].

    Raises:
        ValueError: the head is trainable; its gradient is not computed here.
    """
    if weight.requires_grad:
        raise ValueError("head_loss is for a frozen head: its weight requires a gradient")
    if chunk is None:
        chunk = max(LEAST_CHUNK, CHUNK_BYTES // (4 * weight.size(0)))
    wanted = torch.is_grad_enabled() and hidden.requires_grad  # inside the function neither can be asked
    return _HeadLoss.apply(hidden, weight, labels, group, chunk, wanted)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, group, chunk: int, wanted: bool) -> Tensor:
        losses = torch.empty(hidden.size(0), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if wanted else None
        # One buffer for all chunks: fresh memory would cost more than the arithmetic on it.
        buffer = hidden.new_empty(min(chunk, hidden.size(0)), weight.size(0))
        for begin in range(0, hidden.size(0), chunk):
            part = slice(begin, begin + chunk)
            logits = torch.mm(hidden[part], weight.T, out=buffer[: len(labels[part])])
            losses[part], difference = _chunk(logits.float(), labels[part], group)
            if wanted:
                torch.mm(difference.to(weight.dtype), weight, out=gradient[part])
        if wanted:
            if group is not None:
                dist.all_reduce(gradient, group=group)
            ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    @once_differentiable  # the saved gradient is a constant: a second derivative would be silently wrong
    def backward(ctx, grad_losses: Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_losses[:, None]).to(gradient.dtype), None, None, None, None, None


def _chunk(logits_CV: Tensor, labels_C: Tensor, group) -> tuple[Tensor, Tensor]:
    """(losses fp32 [C], their gradient with respect to this rank's logits, fp32 [C, V]); the logits are overwritten."""
    words = logits_CV.size(1)
    first = 0 if group is None else dist.get_rank(group) * words
    top_C = logits_CV.amax(-1)
    if group is not None:
        dist.all_reduce(top_C, dist.ReduceOp.MAX, group=group)
    here_C = (labels_C >= first) & (labels_C < first + words)
    column_C = (labels_C - first).clamp(0, words - 1)[:, None]
    right_C = torch.where(here_C, logits_CV.gather(-1, column_C).squeeze(-1) - top_C, 0.0)
    total_C = logits_CV.sub_(top_C[:, None]).exp_().sum(-1)
    if group is not None:
        both = torch.stack([right_C, total_C])
        dist.all_reduce(both, group=group)
        right_C, total_C = both
    logits_CV /= total_C[:, None]
    logits_CV.scatter_add_(-1, column_C, -here_C.float()[:, None])
    return total_C.log() - right_C, logits_CV
