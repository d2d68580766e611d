"""config.json, read with care. Light: what is refused from it alone is refused at once, without torch."""

from pathlib import Path

from megatron_patch.errors import UserError
from megatron_patch.io.strict_json import read_json

CONFIG_FILE = "config.json"
MTP_COUNT = "num_nextn_predict_layers"
NATIVE_KEY = "dsa_base_layers"  # of `dsa-upcycle export --layout native`


def read_config(path: Path) -> dict:
    """config.json of a model directory.

    Raises:
        UserError: it is missing or no JSON object, or that of an export in the native layout, which calls itself a
            deepseek_v32 and would be routed by sigmoid like one.
    """
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"a model directory must hold {CONFIG_FILE}: {file} does not exist; give the model's directory")
    try:
        config = read_json(file)
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"{CONFIG_FILE} must be a JSON object: {file}: {error}; download or copy it again") from None
    if NATIVE_KEY in config:
        raise UserError(
            f"pruning reads a native export's experts from its hybrid twin: {path} is in the native layout; prune what "
            "`dsa-upcycle export --layout hybrid` writes of the same checkpoint"
        )
    return config


def whole(config: dict, key: str, *, least: int, default: int | None = None) -> int:
    """A whole number of config.json; a null or absent one is `default`.

    Raises:
        UserError: it is absent without a default, or something else than a whole number of at least `least`.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(
            f"{key} of config.json must be a whole number of at least {least}: {value!r}; get the config.json again"
        )
    return value
