"""The native layout computes what the hybrid does, judged by transformers' deepseek_v32; and says where it does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.checkpoint.oracle import oracle, tensors_of
from tests.checkpoint.test_check import edit_json, edit_tensors
from tests.hf_model.hybrid import tokens
from tests.hf_model.test_older_transformers import run_elsewhere

TOPK, HEADS = 16, 32
TOLERANCE = 2e-5  # fp32, logits up to about 10; the sides add in different orders
ADDITIONS = "model-native-00001.safetensors"


@pytest.fixture(scope="module")
def with_indexers(native, tmp_path_factory) -> Path:
    """The same with random indexers, as trained ones would stand there; so many heads that no score ties. Read only."""
    path = shutil.copytree(native, tmp_path_factory.mktemp("native") / "indexers")
    generator = torch.Generator().manual_seed(5)
    shapes = {"wq_b.weight": (HEADS * 16, 64), "weights_proj.weight": (HEADS, 64)}

    def fill(tensors: dict) -> None:
        for name in [name for name in tensors if ".indexer." in name]:
            shape = shapes.get(name.split(".indexer.")[1], tensors[name].shape)
            tensors[name] = torch.randn(shape, generator=generator) * 0.3 + name.endswith("k_norm.weight")

    for shard in (ADDITIONS, "model-dsa-00001-of-00001.safetensors"):
        edit_tensors(path / shard, fill)
    edit_json(path / "config.json", lambda c: c.update(index_n_heads=HEADS))
    return path


def load(path: Path, **options):
    options = {"trust_remote_code": True, "dtype": torch.float32, "attn_implementation": "eager"} | options
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def multiply_queries_by_f(model, layers: range, eps: float = 1e-6) -> None:
    """The known effect of the second eps, put into a hybrid by hand: q of each base layer times f(v)."""
    for i in layers:
        layer, seen = model.model.layers[i], {}

        def remember(_module, inputs, seen=seen):
            seen["v"] = inputs[0].square().mean(-1, keepdim=True)

        def multiply(_module, _inputs, output, seen=seen):
            return output / torch.sqrt(seen["v"] / (seen["v"] + eps) + eps)

        layer.input_layernorm.register_forward_pre_hook(remember)
        layer.self_attn.q_proj.register_forward_hook(multiply)


@torch.no_grad()
def test_equals_the_hybrid_below_topk_but_for_the_eps(native, exported):
    ids = tokens(3, TOPK)
    hybrid, ours = load(exported), load(native)(ids).logits
    plain = hybrid(ids).logits
    assert plain.abs().max() > 1
    assert (ours - plain).abs().max() > 5 * TOLERANCE  # else the eps would not be tested
    multiply_queries_by_f(hybrid, range(3))
    assert (ours - hybrid(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_deepseek_v32_with_softmax_routing_agrees_below_topk(native, attention):
    ids = tokens(3, TOPK, seed=1)
    assert (load(native, attn_implementation=attention)(ids).logits - oracle(native)(ids).logits).abs().max() <= TOLERANCE


@torch.no_grad()
def test_deepseek_v32_agrees_above_topk_with_the_same_selection(with_indexers):
    """Half-split RoPE on the first dims, k_norm's bias and eps, the normed latent: any of them wrong shows here."""
    ids = tokens(2, 4 * TOPK, seed=2)
    judge, ours = oracle(with_indexers), load(with_indexers)
    theirs, chosen = [], []
    for layer in judge.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda _m, _i, output: theirs.append(output))
    for layer in ours.model.layers:
        layer.self_attn.selection_observer = chosen.append
    expected, got = judge(ids).logits, ours(ids).logits
    assert len(theirs) == len(chosen) == 5
    causal = torch.ones(4 * TOPK, 4 * TOPK, dtype=torch.bool).tril()
    for mask, indices in zip(chosen, theirs, strict=True):
        # short rows of torch.topk are filled up with masked keys
        assert torch.equal(mask, torch.zeros_like(mask).scatter(-1, indices.long(), True) & causal)
        assert mask.sum(-1).max() == TOPK
    assert (got - expected).abs().max() <= TOLERANCE
    dense = judge
    dense.config.index_topk = 4 * TOPK
    for layer in dense.model.layers:
        layer.self_attn.indexer.index_topk = 4 * TOPK
    assert (dense(ids).logits - expected).abs().max() > 1e-2  # the selection decides


@torch.no_grad()
def test_sigmoid_routing_would_be_another_model(native):
    """What transformers does without trust_remote_code; the warning of README and check is true."""
    ids = tokens(1, TOPK)
    stock = AutoModelForCausalLM.from_pretrained(native, dtype=torch.float32, attn_implementation="eager").eval()
    assert type(stock).__module__.startswith("transformers.models.deepseek_v32")
    assert (stock(ids).logits - load(native)(ids).logits).abs().max() > 0.1


def test_resolves_to_our_classes_with_nothing_missing(native):
    config = AutoConfig.from_pretrained(native, trust_remote_code=True)
    assert type(config).__name__ == "DeepseekV32SoftmaxConfig" and config.model_type == "deepseek_v32"
    assert config.dsa_layers == [0, 1, 2, 3, 4] and config.rope_parameters["mscale_all_dim"] == 0.707
    # verl looks the class up by whether the architecture's name is in auto_map
    assert config.architectures[0] in config.auto_map["AutoModelForCausalLM"]
    model, info = AutoModelForCausalLM.from_pretrained(native, trust_remote_code=True, output_loading_info=True)
    assert type(model).__name__ == "DeepseekV32ForCausalLM" and "transformers_modules" in type(model).__module__
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inner = AutoModel.from_pretrained(native, trust_remote_code=True)
    assert type(inner).__name__ == "DeepseekV32Model"
    for each in (model, inner):
        assert frozen(each) == {f"layers.{i}.self_attn.indexer.{n}" for i in range(5) for n in INDEXER}


INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")


def frozen(model) -> set[str]:
    return {name.removeprefix("model.") for name, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("wrapper", ["none", "fsdp1", "fsdp2"])
def test_indexers_do_not_move(native, device, wrapper):
    """Neither by gradients nor by weight decay, in an optimizer that is given every parameter, however it is wrapped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    wrapped = model = load(native, attn_implementation="sdpa").train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if wrapper == "fsdp1":  # gives a gradient of zeros to whatever requires one; verl's default strategy
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    elif wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, weight_decay=0.1)
    ids = tokens(2, 12)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    now = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in wrapped.named_parameters()}
    if wrapper == "fsdp2":
        now = {name: p.full_tensor() for name, p in now.items()}
    assert now.keys() == before.keys()
    moved = {name for name, p in now.items() if not torch.equal(p.reshape(-1), before[name].reshape(-1))}
    assert moved and not [name for name in moved if ".indexer." in name]
    assert "model.layers.0.self_attn.q_a_proj.weight" in moved  # the trainer may train all else


def test_from_config_freezes_too(native):
    config = AutoConfig.from_pretrained(native, trust_remote_code=True)
    assert len(frozen(AutoModelForCausalLM.from_config(config, trust_remote_code=True))) == 25


def test_older_transformers_gives_the_same_logits(with_indexers, tmp_path):
    """In the environment with 5.9.0, which has no deepseek_v32: same class, keys, selection, and generation."""
    ids = tokens(2, 3 * TOPK, seed=3)
    report, out = run_elsewhere(with_indexers, ids, tmp_path)
    assert report["transformers"].startswith("5.9.") and report["class"] == "DeepseekV32ForCausalLM"
    assert not any(report["problems"].values()) and report["foreign_modules"] == []
    assert report["cache_agrees"] and report["padding_agrees"] and report["frozen"] == 25
    model, chosen = load(with_indexers, attn_implementation="sdpa"), []
    for layer in model.model.layers:
        layer.self_attn.selection_observer = chosen.append
    with torch.no_grad():
        assert (model(ids).logits - out["logits"]).abs().max() <= TOLERANCE
    assert torch.equal(torch.stack(chosen), out["chosen"].bool())


def test_saving_gives_the_same_tensors_and_architecture_back(native, tmp_path):
    load(native, dtype="auto").save_pretrained(tmp_path / "again")
    before, after = tensors_of(native), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV32ForCausalLM"] and config["model_type"] == "deepseek_v32"
    assert config["index_topk"] == TOPK and config["q_lora_rank"] == 64 and "dsa_index_topk" not in config
