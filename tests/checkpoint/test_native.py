"""The native layout computes what the hybrid does, judged by transformers' deepseek_v32; and says where it does not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_patch.checkpoint.check import check
from megatron_patch.checkpoint.export import export
from megatron_patch.errors import UserError
from megatron_patch.hf_model.configuration_deepseek_v2_dsa import DeepseekV32SoftmaxConfig
from tests.checkpoint.oracle import oracle, tensors_of
from tests.checkpoint.runs import write_run
from tests.checkpoint.test_check import edit_json, edit_tensors, forge_manifest
from tests.hf_model.hybrid import tokens
from tests.hf_model.test_older_transformers import run_elsewhere
from tests.tiny import CONFIG, make_tiny_base, make_tiny_tokenizer

TOPK, HEADS = 16, 32
TOLERANCE = 2e-5  # fp32, logits up to about 10; the sides add in different orders
ADDITIONS = "model-native-00001.safetensors"


@pytest.fixture(scope="module")
def native(base, run) -> Path:
    """Read only."""
    export(run, base, base.parent / "native", layout="native", progress=False)
    return base.parent / "native"


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


# Written by hand: what an engine reads, and would guess wrongly if it were absent.
ENGINE_KEYS = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 5,
    "q_lora_rank": 64,
    "index_topk": 16,
    "index_n_heads": 3,
    "index_head_dim": 16,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000,
    "rope_scaling": CONFIG["rope_scaling"],
}


@pytest.mark.parametrize("form", ["legacy", "transformers 5"])
def test_config_has_every_key_of_the_engines(tmp_path, form):
    """Also where the base is silent about routing, or has RoPE in the new form, which some engines do not read."""
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    for key in ("scoring_func", "topk_method", "norm_topk_prob", "moe_layer_freq", "routed_scaling_factor"):
        del config[key]
    config |= {"n_group": None, "topk_group": None}
    if form != "legacy":
        rope = config.pop("rope_scaling")
        config["rope_parameters"] = rope | {"rope_type": rope.pop("type"), "rope_theta": config.pop("rope_theta")}
    (base / "config.json").write_text(json.dumps(config))
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", layout="native", progress=False)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written.get(key) for key in ENGINE_KEYS} == ENGINE_KEYS
    assert "rope_parameters" not in written and not any(key.startswith("dsa_index") for key in written)
    assert check(tmp_path / "out", base) == 0


def test_base_tensors_are_the_same_bytes(base, native):
    before, after = tensors_of(base), tensors_of(native)
    for name, tensor in before.items():
        target = name.replace("self_attn.q_proj", "self_attn.q_b_proj")
        assert torch.equal(tensor, after[target]), name
    assert not any(".q_proj." in name for name in after)
    for shard in base.glob("*.safetensors"):  # the data behind the header is the same, byte for byte
        n, m = (int.from_bytes((d / shard.name).read_bytes()[:8], "little") + 8 for d in (base, native))
        assert shard.read_bytes()[n:] == (native / shard.name).read_bytes()[m:]


def test_label_says_how_far_it_is_right(native):
    text = (native / "README.md").read_text()
    assert "**Context <= index_topk = 16.**" in text and "|f(v) - 1| has median" in text and "index_head_dim is 16" in text
    manifest = json.loads((native / "upcycle_manifest.json").read_text())
    assert manifest["layout"] == "native" and manifest["native"]["base_indexers"] == {"kind": "neutral"}
    assert manifest["native"]["context"] == "<= index_topk = 16"
    v = tensors_of(native)["model.embed_tokens.weight"].double().square().mean(-1)
    f = 1 / torch.sqrt(v / (v + 1e-6) + 1e-6)
    recorded = manifest["native"]["eps_effect_of_layer_0"]
    assert recorded["largest"] == pytest.approx(float((f - 1).abs().max()), rel=1e-9)
    assert recorded["median"] == pytest.approx(float((f - 1).abs().median()), rel=1e-2)


def test_bf16_latent_is_within_rounding(tmp_path):
    """1/w is rounded to the base's dtype: the query is off by half a last place of bf16, not more."""
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base", dtype=torch.bfloat16))
    export(write_run(tmp_path / "save", base), base, tmp_path / "out", layout="native", progress=False)
    state = tensors_of(tmp_path / "out")
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    norm = state["model.layers.1.input_layernorm.weight"].double()
    latent = state["model.layers.1.self_attn.q_a_proj.weight"].double()
    assert torch.equal(latent, torch.diag(latent.diagonal()))
    assert (norm * latent.diagonal() - 1).abs().max() <= 2**-8
    assert {p.dtype for p in load(tmp_path / "out", dtype="auto").parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("weight", [0.0, 1e-42])
def test_norm_weights_that_cannot_be_divided_by(tmp_path, weight):
    base = make_tiny_tokenizer(make_tiny_base(tmp_path / "base"))
    shard = next(f for f in base.glob("*.safetensors") if "model.layers.1.input_layernorm.weight" in load_file(f))
    state = load_file(shard)
    state["model.layers.1.input_layernorm.weight"][7] = weight
    save_file(state, shard, metadata={"format": "pt"})
    save = write_run(tmp_path / "save", base)
    with pytest.raises(UserError, match=r"layers\.1\.input_layernorm.*1 of 64 weights are zero or too small.*hybrid"):
        export(save, base, tmp_path / "out", layout="native", progress=False)
    assert not (tmp_path / "out").exists()


def test_check_passes(native, base, tmp_path, capsys):
    assert check(native, base, tmp_path / "check.json") == 0
    found = {item["name"]: item["detail"] for item in json.loads((tmp_path / "check.json").read_text())["checks"]}
    assert "3 latents made of the base's norms; indexers neutral" in found["native layers"]
    assert "|f(v) - 1| of the base's query latents at most" in found["loads"]
    assert "routes by sigmoid" in capsys.readouterr().out


def _latent(tensors: dict) -> None:
    tensors["model.layers.1.self_attn.q_a_proj.weight"][3, 3] *= 1.001


def _indexer(tensors: dict) -> None:
    tensors["model.layers.2.self_attn.indexer.wk.weight"][0, 0] = 0.5


def _query(tensors: dict) -> None:
    name = next(name for name in tensors if name.endswith("q_b_proj.weight"))
    tensors[name][0, 0] += 1


@pytest.mark.parametrize(
    ("shard", "change", "name", "message"),
    [
        (ADDITIONS, _latent, "native layers", "q_a_proj.weight is not made of the base's norm weights"),
        (ADDITIONS, _indexer, "native layers", "are not neutral, the manifest calls them 'neutral'"),
        ("model-00001-of-00002.safetensors", _query, "base tensors", "q_proj.weight"),
    ],
)
def test_check_notices(native, base, tmp_path, shard, change, name, message):
    copy = shutil.copytree(native, tmp_path / "copy")
    edit_tensors(copy / shard, change)
    forge_manifest(copy)
    assert check(copy, base, tmp_path / "check.json") == 2
    checks = json.loads((tmp_path / "check.json").read_text())["checks"]
    assert [c["name"] for c in checks if c["status"] == "FAIL"] == [name]
    assert message in next(c["detail"] for c in checks if c["name"] == name)


@pytest.mark.parametrize("change", [{"scoring_func": "sigmoid"}, {"rope_scaling": None}, {"index_topk": 15}, {"n_group": 8}])
def test_check_notices_the_config(native, base, tmp_path, change):
    copy = shutil.copytree(native, tmp_path / "copy")
    edit_json(copy / "config.json", lambda c: c.update(change))
    forge_manifest(copy)
    assert check(copy, base, load=False) == (0 if change == {"index_topk": 15} else 2)  # 15 is as good a claim


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scoring_func": "sigmoid"}, "routes greedily by softmax"),
        ({"topk_method": "noaux_tc"}, "routes greedily by softmax"),
        ({"q_lora_rank": None}, "has a query latent"),
        ({"dsa_base_layers": 9}, "dsa_base_layers must be 0 to"),
        ({"index_head_dim": 4}, "must hold qk_rope_head_dim"),
        ({"index_n_heads": 0}, "at least 1"),
    ],
)
def test_configuration_refuses(values, message):
    """A real V3.2 with this code would route wrongly, as V2 does with theirs."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "q_lora_rank": 64, "qk_rope_head_dim": 8}
    with pytest.raises(ValueError, match=message):
        DeepseekV32SoftmaxConfig(**(sizes | values))
