"""Compose verl's configuration from several lists of overrides: the settings that matter, or the one-line error.

Given: `launches`, a list of lists of overrides, and `keys` to report.
"""

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

from megatron_patch.errors import UserError
from megatron_patch.verl.compose import compose_config


def main(given_file: str, report_file: str) -> None:
    given, reports = json.loads(Path(given_file).read_text()), []
    for overrides in given["launches"]:
        try:
            config = compose_config(overrides)
        except UserError as error:
            reports.append({"error": str(error)})
            continue
        values = {key: OmegaConf.select(config, key) for key in given["keys"]}
        reports.append({k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in values.items()})
    Path(report_file).write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
