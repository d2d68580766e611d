"""What rank 0 opens under --save before the first step: metrics, and `config.json` beside them."""

import platform
from importlib.metadata import version

from megatron_patch import __version__
from megatron_patch.checkpoint.save import Identity, Progress
from megatron_patch.config import TrainSettings
from megatron_patch.io.publish import atomic_write_json
from megatron_patch.training.checks import CONFIG_FILE, settings_as_json
from megatron_patch.training.metrics import MetricsWriter


def open_output(settings: TrainSettings, identity: Identity, progress: Progress) -> MetricsWriter:
    """Rank 0's metrics; config.json beside them."""
    config = settings_as_json(settings)
    metrics = MetricsWriter(settings.output, config, progress.iteration if settings.resumes_in_place else None)
    pattern = list(identity.layer_pattern)
    content = {"schema": 1, "kind": identity.kind, "settings": config, "layer_pattern": pattern, **_versions()}
    atomic_write_json(settings.output.save / CONFIG_FILE, content)
    return metrics


def _versions() -> dict:
    names = ("torch", "megatron-core", "transformers")
    return {
        "versions": {"dsa-upcycling": __version__, "python": platform.python_version()} | {n: version(n) for n in names}
    }
