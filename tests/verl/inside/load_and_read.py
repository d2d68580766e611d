"""verl's model configuration and class on our directories, its data sets on our parquet, its reward manager on our rewards.

Given: `native`, `hybrid`, `damaged` (a native export that lacks a tensor), `data` (of prepare_rl.py), `chats` (parquet of
conversations), `responses` (per validation row, what a policy answers).
"""

import asyncio
import json
import sys
from pathlib import Path

import cpu_platform  # noqa: F401  (first)
import numpy as np
import torch
from hydra import compose, initialize_config_module
from verl import DataProto
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import hf_tokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config import HFModelConfig

EXTERNAL = "megatron_patch.verl.external"


def load(path: str, **options) -> dict:
    """What verl's FSDP engine does to build a model."""
    config = HFModelConfig(path=path, override_config={"attn_implementation": "sdpa"}, **options)
    auto_class = get_hf_auto_model_class(config.hf_config)
    try:
        model, info = auto_class.from_pretrained(
            config.local_path, torch_dtype=torch.float32, config=config.hf_config,
            trust_remote_code=config.trust_remote_code, output_loading_info=True,
        )  # fmt: skip
    except ValueError as error:
        return {"error": str(error)}
    return {
        "auto_class": auto_class.__name__,
        "class": type(model).__name__,
        "module": type(model).__module__,
        "config": type(config.hf_config).__name__,
        "problems": sum(len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")),
        "frozen": sum(not p.requires_grad for p in model.parameters()),
        "ids": [config.hf_config.bos_token_id, config.hf_config.eos_token_id, config.hf_config.pad_token_id],
        "attention": config.hf_config._attn_implementation,
    }


def read_rl(path: Path, tokenizer, config) -> list[dict]:
    data = RLHFDataset(str(path), tokenizer, config.data)
    rows = []
    for i in range(len(data)):
        row = data[i]
        ids = tokenizer.apply_chat_template(
            row["raw_prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        rows.append({**{k: row[k] for k in ("raw_prompt", "data_source", "reward_model", "index")}, "ids": list(ids)})
    return rows


def read_sft(path: Path, tokenizer) -> list[dict]:
    data = MultiTurnSFTDataset([str(path)], tokenizer, {"pad_mode": "no_padding", "max_length": 1024})
    return [{key: data[i][key].tolist() for key in ("input_ids", "loss_mask")} for i in range(len(data))]


async def reward(rows: list[dict], responses: list[str], tokenizer, config) -> list[dict]:
    """Through the manager that the configuration names, each response as tokens with padding behind."""
    manager = load_reward_manager(config, tokenizer)
    results = []
    for row, response in zip(rows, responses, strict=True):
        ids = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        padded = torch.tensor([ids + [tokenizer.pad_token_id] * 3])
        mask = torch.cat([torch.ones(1, 2 + len(ids)), torch.zeros(1, 3)], 1).long()
        item = _item(padded, mask, row)
        results.append(await manager.run_single(item))
    return results


def _item(padded: torch.Tensor, mask: torch.Tensor, row: dict) -> DataProto:
    def one(value):
        holder = np.empty(1, dtype=object)
        holder[0] = value
        return holder

    return DataProto.from_dict(
        tensors={"prompts": torch.full((1, 2), 5), "responses": padded, "attention_mask": mask},
        non_tensors={
            "data_source": one(row["data_source"]),
            "reward_model": one(row["reward_model"]),
            "extra_info": one({}),
        },
    )


def main(given_file: str, report_file: str) -> None:
    given = json.loads(Path(given_file).read_text())
    torch.set_num_threads(1)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=given["overrides"])
    # with the code of the directory first: once registered, the release's class answers for native
    report = {"remote": {name: load(given[name], trust_remote_code=True) for name in ("native", "hybrid")}}
    report["registered"] = load(given["native"], trust_remote_code=False, external_lib=EXTERNAL)
    report["damaged"] = load(given["damaged"], trust_remote_code=False, external_lib=EXTERNAL)
    tokenizer, data = hf_tokenizer(given["native"]), Path(given["data"])
    report["train"] = read_rl(data / "train.parquet", tokenizer, config)
    report["validation"] = read_rl(data / "validation.parquet", tokenizer, config)
    report["answers"] = read_sft(data / "sft.parquet", tokenizer)
    report["chats"] = read_sft(Path(given["chats"]), tokenizer)
    report["rewards"] = asyncio.run(reward(report["validation"], given["responses"], tokenizer, config))
    Path(report_file).write_text(json.dumps(report, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
