"""Compose verl's own Hydra configuration from a launch's overrides, let verl check it, and print it.

    python -m megatron_patch.verl.compose OVERRIDES...

What `python -m verl.trainer.main_ppo OVERRIDES...` would start with: an unknown key, a mode that verl does not know or batch sizes that
do not fit end here with one line instead of on a cluster.
"""

import contextlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from megatron_patch.errors import UserError, run

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG = "ppo_trainer"


def compose_config(overrides: list[str]) -> "DictConfig":
    """verl's configuration with these overrides, checked by verl.

    Raises:
        UserError: verl is not installed, an override that Hydra refuses, or a configuration that verl refuses.
    """
    if importlib.util.find_spec("verl") is None:
        raise UserError(
            "verl must be importable to compose its configuration: it is not; run this in verl's environment (docs/verl.md)"
        )
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose(CONFIG, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"verl's configuration must take every override: {_first_line(error)}; mend the setting of that name"
        ) from error
    with contextlib.redirect_stdout(sys.stderr):  # verl prints that all is well; stdout holds the configuration
        _validate(config)
    return config


def _validate(config: "DictConfig") -> None:
    """The checks of verl's entry point, and its typed settings, which refuse more."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        for typed in (config.actor_rollout_ref.rollout, config.algorithm):
            omega_conf_to_dataclass(typed)
    except (ValueError, AssertionError, TypeError, HydraException, OmegaConfBaseException) as error:
        raise UserError(
            f"verl must accept the configuration: {_first_line(error)}; change the settings that it names"
        ) from error


def _first_line(error: BaseException) -> str:
    """Hydra wraps what was raised inside: the innermost message says it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def main() -> None:
    from omegaconf import OmegaConf

    config = compose_config(sys.argv[1:])
    print(OmegaConf.to_yaml(config, resolve=True))


if __name__ == "__main__":
    sys.exit(run(main))
