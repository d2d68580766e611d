"""One optimizer step: its gradients depend on the global batch alone."""

import pytest
import torch

from megatron_patch.data.batch import PackedBatch
from megatron_patch.devices.device import Device
from megatron_patch.planning.flops import StepFlops
from megatron_patch.training.optimizer import build_optimizer, inner_optimizers, wrap_ddp
from megatron_patch.training.step import TrainStep
from tests.model.build import tiny_model


def no_flops(lengths, dense) -> StepFlops:
    """Stands in for a counter."""
    return StepFlops(0, 0, 0)


def batches(rows: list[tuple[int, int]], per_batch: int) -> list[PackedBatch]:
    """Rows of (length, supervised tokens), `per_batch` to a micro-batch; the first token of each row is padding."""
    generator = torch.Generator().manual_seed(9)
    made = []
    for length, supervised in rows:
        tokens = torch.randint(0, 320, (length + 1,), generator=generator)
        mask = torch.zeros(length)
        mask[-supervised:] = 1
        made.append((tokens[:-1], tokens[1:], mask))
    result = []
    for start in range(0, len(made), per_batch):
        part = made[start : start + per_batch]
        tokens, labels, mask = (torch.cat(columns) for columns in zip(*part, strict=True))
        lengths = torch.tensor([0] + [len(row[0]) for row in part])
        cuts = lengths.cumsum(0).int()
        valid = torch.ones(len(tokens), dtype=torch.bool)
        valid[cuts[:-1].long()] = False
        result.append(PackedBatch(tokens, labels, mask, valid, cuts))
    return result


def gradients(base, device: Device, per_batch: int, stage: str, make_settings, tmp_path, coefficient: float = 0.7):
    model, state, _ = tiny_model(base, init="copy")
    settings = make_settings(tmp_path, "unused", optimizer="sgd", lr=0.0, min_lr=0.0, clip_grad=0.0).optim
    ddp = wrap_ddp(model, use_distributed_optimizer=False)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
    step = TrainStep(ddp, optimizer, state, device, coefficient, no_flops)
    # Unequal supervised counts: a mean of micro-batch means would weigh tokens unequally.
    result = step(batches([(30, 3), (40, 20), (22, 1), (35, 9)], per_batch), stage)
    grads = {name: p.main_grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return result, grads


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_one_and_four_micro_batches_give_equal_gradients(device, tiny_base, make_settings, tmp_path, stage):
    one, grads_one = gradients(tiny_base, device, 4, stage, make_settings, tmp_path)
    four, grads_four = gradients(tiny_base, device, 1, stage, make_settings, tmp_path)
    assert one.lm_loss == pytest.approx(four.lm_loss, rel=1e-5)
    assert one.indexer_kl == pytest.approx(four.indexer_kl, rel=1e-5)
    assert one.index_recall == pytest.approx(four.index_recall, rel=1e-5)
    assert one.grad_norm == pytest.approx(four.grad_norm, rel=1e-4)
    assert one.tokens == four.tokens == 30 + 40 + 22 + 35 - 4
    for name, grad in grads_one.items():
        scale = grad.abs().max().item()
        assert scale > 0 or "experts" in name, name
        torch.testing.assert_close(grad, grads_four[name], atol=1e-5 * scale + 1e-9, rtol=1e-4, msg=name)


def test_gradients_are_those_of_the_mean_losses(device, tiny_base, make_settings, tmp_path):
    """Against a plain backward of mean LM loss + coefficient x mean KL, without schedule, DDP or AttachLoss scale."""
    from megatron_patch.model.builder import forward_pack

    _, grads = gradients(tiny_base, device, 1, "sparse", make_settings, tmp_path)
    model, state, _ = tiny_model(tiny_base, init="copy")
    [batch] = batches([(30, 3), (40, 20), (22, 1), (35, 9)], 4)
    state.counted, kls = batch.valid, []
    for layer in model.decoder.layers[3:]:
        attention = layer.self_attention
        inner = attention.backend.attention
        attention.backend = type(attention.backend)(
            "recorded", ("cpu",), lambda *a, inner=inner, **k: kls.append(inner(*a, **k)) or kls[-1]
        )
    losses = forward_pack(model.train(), batch.tokens, batch.cu_seqlens, batch.labels)
    loss = (losses * batch.loss_mask).sum() / batch.loss_mask.sum()
    kl = sum(result.indexer_kl for result in kls) / batch.valid.sum()
    (loss + 0.7 * kl).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5 * scale + 1e-9, rtol=1e-4, msg=name)


@pytest.mark.parametrize("stage", ["dense", "sparse"])
@pytest.mark.parametrize("coefficient", [0.0, 0.7])
def test_overlapped_sums_wait_for_no_gradient_that_never_comes(device, tiny_base, make_settings, tmp_path, stage, coefficient):
    """Experts without a token, indexers without a loss: megatron-core sums a bucket once all of its gradients are there."""
    found = []
    for overlap in (False, True):
        model, state, _ = tiny_model(tiny_base, init="copy")
        settings = make_settings(tmp_path, "unused", optimizer="sgd", lr=0.0, min_lr=0.0, clip_grad=0.0).optim
        ddp = wrap_ddp(model, False, overlap_grad_reduce=overlap)
        optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
        step = TrainStep(ddp, optimizer, state, device, coefficient, no_flops)
        for rows in ([(40, 9), (30, 2)], [(3, 2), (2, 1)], [(3, 2), (2, 1)]):  # the first step tells megatron-core how many to await
            step(batches(rows, 1), stage)
        found.append({name: p.main_grad.clone() for name, p in model.named_parameters() if p.requires_grad})
    assert any(grad.abs().max() == 0 for name, grad in found[0].items() if "experts" in name)
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_no_optimizer_state_for_frozen_parameters(
    device, tiny_base, make_settings, tmp_path, distributed_optimizer
):
    model, state, _ = tiny_model(tiny_base, init="copy")
    settings = make_settings(tmp_path, "unused").optim
    ddp = wrap_ddp(model, distributed_optimizer)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=distributed_optimizer)
    TrainStep(ddp, optimizer, state, device, 1.0, no_flops)(batches([(30, 3)], 1), "sparse")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = sum(
        tensor.numel()
        for inner in inner_optimizers(optimizer)
        for values in inner.state.values()
        for key, tensor in values.items()
        if key == "exp_avg"
    )
    assert moments == trainable < sum(p.numel() for p in model.parameters())
    assert all(not hasattr(p, "main_grad") for p in model.parameters() if not p.requires_grad)


def test_indexer_lr_reaches_the_indexers_alone(device, tiny_base, make_settings, tmp_path):
    model, _, _ = tiny_model(tiny_base, init="copy")
    settings = make_settings(tmp_path, "unused", lr=1e-4, min_lr=1e-5, indexer_lr=1e-2, weight_decay=0.1).optim
    ddp = wrap_ddp(model, False)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
    names = {id(p): name for name, p in model.named_parameters()}
    seen = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen[names[id(parameter)]] = (group.get("max_lr"), group["wd_mult"])
    assert len(seen) == sum(p.requires_grad for p in model.parameters())
    for name, (rate, wd_mult) in seen.items():
        assert rate == (1e-2 if ".indexer." in name else 1e-4), name
        assert wd_mult == (0.0 if "norm" in name else 1.0), name


def test_muon_takes_matrices_and_adam_the_rest(device, tiny_base, make_settings, tmp_path):
    model, state, _ = tiny_model(tiny_base, init="copy")
    settings = make_settings(tmp_path, "unused", optimizer="muon", indexer_lr=1e-2, lr=1e-3).optim
    ddp = wrap_ddp(model, False)
    optimizer = build_optimizer(ddp, settings, bf16=False, use_distributed_optimizer=False)
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {}
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                assert name not in taken
                taken[name] = type(inner).__name__
    assert taken.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    for name, kind in taken.items():
        matrix = "norm" not in name and "router" not in name and ".indexer." not in name
        assert kind == ("Muon" if matrix else "AdamW"), name
    before = {name: p.clone() for name, p in model.named_parameters()}
    result = TrainStep(ddp, optimizer, state, device, 1.0, no_flops)(batches([(30, 3), (40, 20)], 1), "sparse")
    assert result.grad_norm > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved <= set(taken) and any(taken[name] == "Muon" for name in moved)
    assert any(taken[name] == "AdamW" for name in moved)
