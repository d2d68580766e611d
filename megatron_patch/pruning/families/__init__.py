"""What pruning knows of each model family, as data: one file a family. `family_of` finds it by `model_type`."""

from .family import Family


def families() -> dict[str, Family]:
    """Every supported family by its `model_type`."""
    from . import deepseek_v2, deepseek_v3, deepseek_v4, deepseek_v32

    known = (deepseek_v2.FAMILY, deepseek_v3.FAMILY, deepseek_v32.FAMILY, deepseek_v4.FAMILY)
    return {family.model_type: family for family in known}


def family_of(config: dict) -> Family:
    """The family of a config.json.

    Raises:
        UserError: `model_type` is not supported; the message lists the ones that are.
    """
    from .family import unsupported

    known = families()
    model_type = config.get("model_type")
    if model_type not in known:
        raise unsupported(model_type, known)
    return known[model_type]
