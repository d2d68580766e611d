"""`actor_rollout_ref.model.external_lib=megatron_patch.verl.external`: imported by verl in every worker, before any model.

Registers this release's class for `deepseek_v32`, so that a native export loads without the code in its directory
(`trust_remote_code=False`), and with it the conversion of per-expert weights, without which transformers 5 leaves experts random.
A directory whose tensors are not exactly the class's is refused: transformers only prints a report, and trains what is random.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_patch.hf_model.configuration_deepseek_v2_dsa import DeepseekV32SoftmaxConfig
from megatron_patch.hf_model.modeling_deepseek_v2_dsa import DeepseekV32ForCausalLM, DeepseekV32Model


def checked(model_class: type) -> type:
    """A class of the same name whose `from_pretrained` raises on missing, unexpected or mismatched tensors.

    The same name: it is what a saved configuration gives as its architecture.
    """

    def from_pretrained(cls, path, *args, output_loading_info: bool = False, **kwargs):
        model, info = super(subclass, cls).from_pretrained(path, *args, output_loading_info=True, **kwargs)
        wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            counts = ", ".join(f"{len(names)} {key.replace('_', ' ')}" for key, names in wrong.items() if names)
            first = next(names[0] for names in wrong.values() if names)
            raise ValueError(
                f"the tensors of a directory must be those of {cls.__name__}: {path} has {counts}, e.g. {first}; export it again, "
                "or run `dsa-upcycle check`"
            )
        return (model, info) if output_loading_info else model

    subclass = type(
        model_class.__name__, (model_class,), {"__module__": __name__, "from_pretrained": classmethod(from_pretrained)}
    )
    return subclass


def register() -> None:
    """Done at import; once more does nothing new."""
    AutoConfig.register(DeepseekV32SoftmaxConfig.model_type, DeepseekV32SoftmaxConfig, exist_ok=True)
    AutoModel.register(DeepseekV32SoftmaxConfig, DeepseekV32Model, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV32SoftmaxConfig, checked(DeepseekV32ForCausalLM), exist_ok=True)


register()
