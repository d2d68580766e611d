"""verl's own actor worker on one gloo process: log-probs of a padded batch, one GRPO update, the tensors that an engine gets.

Given: `overrides` (of the launch script), `model`, and `runs`, a list of more overrides. Per run: log-probs' largest difference
to the model alone, the update's metrics, the tensors' names, what moved, or the error that stopped it. The first run leaves
`checkpoint/` and `after.safetensors`.
"""

import json
import sys
from pathlib import Path

import cpu_platform  # noqa: F401  (first)
import torch
import verl.workers.engine.fsdp.transformer_impl as engine_module
from hydra import compose, initialize_config_module
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.model import compute_position_id_with_mask
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

BATCH, PROMPT, RESPONSE = 4, 14, 12


class OneProcessFSDP(engine_module.FSDP):
    """verl asks for `sync_module_states`, for which torch wants parameters on a GPU; one process has none to sync with."""

    def __init__(self, *args, sync_module_states: bool, **kwargs):
        super().__init__(*args, **kwargs)


def batch_of_rows() -> DataProto:
    """Left-padded prompts and right-padded responses, as an agent loop gives them; longer than index_topk = 16."""
    ids = torch.randint(3, 259, (BATCH, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, -2:] = 0
    rows = {
        "input_ids": ids, "attention_mask": mask, "position_ids": compute_position_id_with_mask(mask),
        "prompts": ids[:, :PROMPT], "responses": ids[:, PROMPT:], "response_mask": mask[:, PROMPT:].clone(),
    }  # fmt: skip
    return DataProto.from_single_dict(rows, meta_info={"temperature": 1.0})


@torch.no_grad()
def log_probs_alone(model, batch: DataProto) -> torch.Tensor:
    """Of the responses, each row by itself, without padding or packing."""
    out = torch.zeros(BATCH, RESPONSE)
    for i in range(BATCH):
        kept = batch.batch["attention_mask"][i].bool()
        ids = batch.batch["input_ids"][i][kept][None]
        log_probs = model(ids[:, :-1]).logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        length = int(batch.batch["response_mask"][i].sum())
        out[i, :length] = log_probs[-length:]
    return out


def tensors(worker) -> dict[str, torch.Tensor]:
    """What an engine would get at a sync."""
    return {name: tensor.detach().clone() for name, tensor in worker.actor.engine.get_per_tensor_param()[0]}


def update(config, model_dir: str, save: Path | None) -> dict:
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    before, batch = tensors(worker), batch_of_rows()

    rows = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(rows, calculate_entropy=True, compute_loss=False)
    old = no_padding_2_padding(worker.compute_log_prob(rows)["log_probs"], rows).float()
    # loaded after verl's worker, and so with the same registered class
    alone = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()
    off = ((old - log_probs_alone(alone, batch)) * batch.batch["response_mask"]).abs().max().item()

    batch.batch["old_log_probs"] = old
    batch.batch["advantages"] = torch.randn(BATCH, 1, generator=torch.Generator().manual_seed(1)).expand(-1, RESPONSE)
    rows = left_right_2_no_padding(batch.to_tensordict())
    tu.assign_non_tensor(
        rows, calculate_entropy=True, distillation_use_topk=False, distillation_only=False, compute_loss=True,
        global_batch_size=BATCH, mini_batch_size=BATCH, epochs=1, seed=1, dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    metrics = tu.get(worker.update_actor(rows), "metrics")
    after = tensors(worker)
    if save is not None:
        worker.save_checkpoint(str(save / "checkpoint"), None, 1, None)
        save_file({name: tensor.contiguous() for name, tensor in after.items()}, save / "after.safetensors")
    return {
        "class": f"{type(alone).__module__}.{type(alone).__name__}",
        "log_prob_difference": off,
        "grad_norm": metrics["grad_norm"][0],
        "names": list(after),
        "shapes": {name: list(tensor.shape) for name, tensor in after.items()},
        "moved": [name for name in after if not torch.equal(after[name], before[name])],
    }


def main(given_file: str, report_file: str) -> None:
    given = json.loads(Path(given_file).read_text())
    torch.set_num_threads(1)
    # before verl would: its own call names the CPU twice
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    engine_module.FSDP = OneProcessFSDP
    reports = []
    with initialize_config_module("verl.trainer.config", version_base=None):
        for i, more in enumerate(given["runs"]):
            config = compose("ppo_trainer", overrides=[*given["overrides"], *more])
            try:
                reports.append(update(config, given["model"], Path(report_file).parent if i == 0 else None))
            except ValueError as error:
                reports.append({"error": str(error)})
    Path(report_file).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
