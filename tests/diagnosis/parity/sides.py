"""Both sides of a journey in one line each, without the command line."""

import torch

from megatron_patch.diagnosis.parity.checkpoint_side import dump_checkpoint
from megatron_patch.diagnosis.parity.text import read_pack
from megatron_patch.evaluation.loading import inspect_directory, load_model
from tests.diagnosis.parity.conftest import DOCUMENTS, TOKENS, Journey


def pack_of(journey: Journey, documents: int = DOCUMENTS):
    return read_pack(journey.text, journey.export, TOKENS, documents)


def model_of(journey: Journey):
    return load_model(inspect_directory(journey.export), dtype=journey.torch_dtype)


def checkpoint_dump(journey: Journey, model=None, documents: int = DOCUMENTS):
    pack, model = pack_of(journey, documents), model or model_of(journey)
    return dump_checkpoint(
        model, journey.export, pack.tokens, pack.cu_seqlens, topk=8, environment={}, dtype=journey.dtype
    )


def trainer_of(journey: Journey, backend: str = "auto"):
    from megatron_patch.devices.device import Device
    from megatron_patch.diagnosis.parity.trainer_side import load_trainer

    cpu = Device("cpu", torch.device("cpu"), "gloo")
    return load_trainer(journey.save, cpu, dtype=journey.torch_dtype, backend=backend)


def trainer_dump(journey: Journey, trainer=None, documents: int = DOCUMENTS):
    from megatron_patch.diagnosis.parity.trainer_side import dump_trainer

    pack, trainer = pack_of(journey, documents), trainer or trainer_of(journey)
    return dump_trainer(trainer, pack.tokens, pack.cu_seqlens, {}, journey.dtype)
