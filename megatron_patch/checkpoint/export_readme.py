"""README.md of an export: what it is, how to load it, and how loading goes wrong in silence."""

from dataclasses import dataclass
from pathlib import Path

from megatron_patch.checkpoint.base_indexers import BaseIndexers
from megatron_patch.checkpoint.layouts import ARCHITECTURES, HYBRID
from megatron_patch.checkpoint.native_view import NativeView
from megatron_patch.io.publish import atomic_write_text
from megatron_patch.model.layer_pattern import DSA, format_pattern

README = """\
# {name}

{base_name} with {num_dsa} DSA (DeepSeek Sparse Attention) layer{plural} on top: layers `{pattern}`.
The base's {num_base} layers are frozen and byte for byte the base's; layer{plural} {layers} were trained
({kind}, iteration {iteration}). Every query of a DSA layer attends to the {topk} keys that its indexer scores highest.

## Load it
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{name}"  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype="auto", attn_implementation="sdpa")
```
Works with transformers 5.9.0 and 5.24.0; `attn_implementation` is `sdpa` or `eager`. The chat template writes the
beginning-of-sequence token itself: tokenise rendered text with `add_special_tokens=False`, or it stands twice.

> **Warning: without `trust_remote_code=True` nothing fails, and the model is wrong.** transformers then takes its
> stock `DeepseekV2ForCausalLM`: the DSA layers get a **random** query projection, and only a load report says
> so. Their attention would moreover be dense: different from this model beyond {topk} tokens whatever the
> weights. Check `model.config.architectures` against `type(model).__name__`: both must be `{architecture}`.

## In verl
```
actor_rollout_ref.model.path={name}
actor_rollout_ref.model.trust_remote_code=True
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
```
`flash_attention_2` is refused by this code. vLLM, vllm-ascend and SGLang do not serve this layout: they switch DSA
on for all layers or for none.

## What the files are
`upcycle_manifest.json` names the base and its hash, the settings of the DSA layers, the training, the hash of the
frozen weights, and the SHA-256 of every file here. `configuration_*.py` and `modeling_*.py` are the code that
`auto_map` names; nothing of the base's own code is here. The base's licence applies to its weights.
"""


NATIVE_README = """\
# {name}

{base_name} with {num_dsa} DSA (DeepSeek Sparse Attention) layer{plural} on top, in the **native** layout: all {num_all} layers are DSA,
under DeepSeek-V3.2's names (`DeepseekV32ForCausalLM`), so that an inference engine and a trainer load one directory and
exchange tensors by name. Layers 0 to {last_base} are the frozen base's, layer{plural} {layers} {were} trained ({kind}, iteration {iteration}).

{label}

## What the base's layers got
- **A query latent that changes nothing**: `q_a_proj` = diag(1/w), `q_a_layernorm` = w, `q_b_proj` = the base's `q_proj`
  bit for bit, with w = `input_layernorm`. Its norm adds an eps a second time: the query is multiplied by
  f(v) = 1/sqrt(v/(v + eps) + eps), v the mean square of the layer's input. Over the embedding's rows, which are layer 0's
  input, |f(v) - 1| has median {eps_median:.1e} and at most {eps_largest:.1e}; deeper layers read larger states.
- **An indexer**, {indexers}.
Everything else of the base is there bit for bit.

## Load it
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "{name}"  # this directory
tokenizer = AutoTokenizer.from_pretrained(path)
model, info = AutoModelForCausalLM.from_pretrained(
    path, trust_remote_code=True, dtype="auto", attn_implementation="sdpa", output_loading_info=True
)
assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
```
Works with transformers 5.9.0 and 5.24.0; `attn_implementation` is `sdpa` or `eager`. The chat template writes the
beginning-of-sequence token itself: tokenise rendered text with `add_special_tokens=False`, or it stands twice.

> **Warning: without `trust_remote_code=True` transformers 5.11 and later do not fail, and the model is wrong.** They take their own
> `deepseek_v32`, which routes by sigmoid whatever `scoring_func` says. Older releases refuse the model type. The right
> class has `type(model.config).__name__ == "DeepseekV32SoftmaxConfig"`.

## In vLLM, vllm-ascend, SGLang
They know the architecture and read `scoring_func: softmax`, `topk_method: greedy` from config.json. **No engine has been run on
this directory by the release that wrote it.** Its keys and tensor names are those of DeepSeek-V3.2 without FP8 scales, without
`e_score_correction_bias` and without a multi-token-prediction layer.
{notes}
## In verl
```
actor_rollout_ref.model.path={name}
actor_rollout_ref.model.trust_remote_code=True
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
```
`flash_attention_2` is refused by this code. No gradient reaches an indexer in it, so that all are `requires_grad=False`, and no
weight decay moves them. FSDP2 takes such layers as they are; FSDP1 needs `use_orig_params=True`, and says so.

## What the files are
`upcycle_manifest.json` names the base and its hash, the settings of the DSA layers, the training, the hash of the
frozen weights, and the SHA-256 of every file here. `configuration_*.py` and `modeling_*.py` are the code that
`auto_map` names; nothing of the base's own code is here. The base's licence applies to its weights.
"""
_NEUTRAL = """\
> **Context <= index_topk = {topk}.** The indexers of the base's layers are neutral: they score every key 0. As long as a
> query has no more than {topk} keys that changes nothing, since all are selected. Beyond, the base's layers would
> attend to an arbitrary {topk} of their keys, and the model is another one. For longer contexts train the base's
> indexers (`pretrain_upcycle.py --train base-indexers`) and export with `--base-indexers`, or use `--layout hybrid`."""


_TRAINED = """\
The indexers of the base's layers are trained. Up to {topk} tokens of context the model equals the hybrid layout; beyond, the
base's layers attend to the {topk} keys that their indexers choose, though their weights were made for attention to all. How
much of the attention that finds stands in the `base_indexers.json` of the indexers' run."""


def _trained_indexers(indexers: BaseIndexers) -> str:
    manifest = indexers.manifest
    return f"trained on this base's own attention (iteration {manifest.iteration}, {manifest.consumed_tokens:,} tokens)"


@dataclass(frozen=True)
class Story:
    """What a README tells of one export.

    Attributes:
        kind, iteration: of the training.
        native: of the native layout.
    """

    name: str
    base_name: str
    pattern: tuple[str, ...]
    topk: int
    kind: str
    iteration: int
    native: NativeView | None = None


def write_readme(output: Path, story: Story) -> None:
    """Write README.md into the directory of an export."""
    layers = [str(i) for i, layer in enumerate(story.pattern) if layer == DSA]
    values = dict(
        name=story.name,
        base_name=story.base_name,
        num_dsa=len(layers),
        plural="" if len(layers) == 1 else "s",
        pattern=format_pattern(story.pattern),
        num_base=len(story.pattern) - len(layers),
        layers=", ".join(layers),
        kind={"pretrain": "upcycle pretraining", "sft": "supervised fine-tuning"}[story.kind],
        iteration=story.iteration,
        topk=story.topk,
        architecture=ARCHITECTURES[HYBRID],
    )
    if story.native is None:
        text = README.format(**values)
    else:
        indexers = story.native.indexers
        values |= dict(
            num_all=len(story.pattern),
            last_base=len(story.pattern) - len(layers) - 1,
            were="was" if len(layers) == 1 else "were",
            label=(_NEUTRAL if indexers is None else _TRAINED).format(topk=story.topk),
            indexers="neutral" if indexers is None else _trained_indexers(indexers),
            eps_median=story.native.effect.median,
            eps_largest=story.native.effect.largest,
            notes="".join(f"- {note}.\n" for note in story.native.kernel_notes()),
        )
        text = NATIVE_README.format(**values)
    atomic_write_text(output / "README.md", text)
