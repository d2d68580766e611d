"""What a launch is refused for, from the directory's small files."""

import json
import shutil
from dataclasses import replace

import pytest

from megatron_patch.errors import UserError
from megatron_patch.verl.check_launch import Launch, check_launch
from tests.checkpoint.test_check import edit_json


@pytest.fixture
def launch(native, tmp_path) -> Launch:
    """Fits; on a copy that tests may change."""
    path = shutil.copytree(native, tmp_path / "native")
    return Launch(path, "fsdp2", "vllm", context=16, devices=8, rollout_tensor_parallel=4)


def pruned(launch: Launch, **changes) -> Launch:
    """The same directory as if it were a pruned V3.2: no code of ours, sigmoid routing."""

    def change(config: dict) -> None:
        del config["auto_map"]
        config.update({"scoring_func": "sigmoid", "topk_method": "noaux_tc"} | changes)

    edit_json(launch.model / "config.json", change)
    return replace(launch, trainer="megatron", bridge="my_bridge", context=4096)


def test_what_fits_is_noted(launch):
    assert check_launch(launch) == [
        "contexts of 16 tokens fit index_topk = 16: no indexer chooses anything in this run"
    ]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context": 17}, "PROMPT_LENGTH + RESPONSE_LENGTH must be at most index_topk = 16, because the base's indexers are neutral: 17"),
        ({"rollout_tensor_parallel": 3}, "ROLLOUT_TP must divide the 4 attention heads: 3"),
        ({"devices": 6}, "ROLLOUT_TP must divide the 6 devices: 4"),
        ({"expert_parallel": 3}, "EP must divide the 8 routed experts of the model: 3"),
        ({"trainer": "megatron"}, "TRAINER=megatron needs a bridge for DeepseekV32ForCausalLM: none is named"),
        ({"router_replay": "R3"}, "ROUTER_REPLAY=R3 needs TRAINER=megatron"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(launch, change, message):
    with pytest.raises(UserError) as error:
        check_launch(replace(launch, **change))
    assert str(error.value).startswith(message) and "; " in str(error.value)


@pytest.mark.parametrize("file", ["generation_config.json", "tokenizer.json", "chat_template.jinja", "model-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json"])  # fmt: skip
def test_an_incomplete_directory_is_refused(launch, file):
    (launch.model / file).unlink()
    with pytest.raises(UserError, match=file.replace("chat_template.jinja", "chat template").split("-of")[0]):
        check_launch(launch)


def test_a_hybrid_is_refused(exports, launch):
    with pytest.raises(UserError, match="is a hybrid export; export it with --layout native"):
        check_launch(replace(launch, model=exports["hybrid"]))


def test_trained_indexers_lift_the_limit(launch):
    edit_json(launch.model / "upcycle_manifest.json", lambda m: m["native"]["base_indexers"].update(kind="trained"))
    assert check_launch(replace(launch, context=4096)) == []


def test_a_pruned_model_goes_to_megatron_with_notes(launch):
    ready = pruned(launch, quantization_config={"quant_method": "fp8"})
    notes = check_launch(replace(ready, ascend=True, router_replay="R3", expert_parallel=4))
    assert len(notes) == 2 and "the weights are fp8" in notes[0] and notes[1].startswith("8 experts:")
    with pytest.raises(UserError, match="TRAINER=fsdp2 needs a model that verl's transformers can build"):
        check_launch(replace(ready, trainer="fsdp2"))


def test_two_architectures_are_refused(launch):
    edit_json(launch.model / "config.json", lambda c: c["architectures"].append("Other"))
    with pytest.raises(UserError, match="must name one architecture"):
        check_launch(launch)


def test_a_damaged_config_is_named(launch):
    (launch.model / "config.json").write_text(json.dumps({})[:-1])
    with pytest.raises(UserError, match=r"config.json must be JSON"):
        check_launch(launch)
