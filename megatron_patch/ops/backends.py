"""Which implementation computes DSA: chosen by name, checked at construction, never replaced in silence."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_patch.ops import by_length, chunked, npu, npu_limits, reference, sparse
from megatron_patch.ops.checks import DsaSizes

AUTO = "auto"


@dataclass(frozen=True)
class DsaBackend:
    """An implementation of `reference.dsa_attention`, with that signature.

    Attributes:
        name: as given to `--dsa-backend`.
        devices: torch device types on which it runs.
        attention: the op.
        absorbed: for the sparse stage in its place, over MLA's latent: `npu.absorbed_attention`. None: there is none.
        check: raises ValueError where it cannot take a model of these sizes. None: it takes all.
        describe: what a run prints once, beside the name. None: nothing.
    """

    name: str
    devices: tuple[str, ...]
    attention: Callable[..., reference.DsaOutput]
    absorbed: Callable[..., reference.DsaOutput] | None = None
    check: Callable[[DsaSizes], None] | None = None
    describe: Callable[[DsaSizes], str] | None = None


BACKENDS = {
    backend.name: backend
    for backend in (
        DsaBackend("reference", ("cpu", "cuda", "npu"), reference.dsa_attention),
        DsaBackend("chunked", ("cpu", "cuda", "npu"), chunked.dsa_attention),
        DsaBackend("sparse", ("cpu",), sparse.dsa_attention),  # its products are not measured on a GPU
        DsaBackend("by-length", ("cpu",), by_length.dsa_attention),
        # The dense stage and the indexers of base layers, which learn from dense attention, are plain torch there as well.
        DsaBackend("npu", ("npu",), chunked.dsa_attention, npu.absorbed_attention, npu_limits.check, npu_limits.describe),
    )
}
# What "auto" means on each device: the best backend that this release has for it.
_AUTO = {"cpu": "by-length", "cuda": "chunked", "npu": "npu"}


def choose_backend(name: str, device_type: str) -> DsaBackend:
    """The backend `name` ("auto": this device's best) for tensors on `device_type`.

    Raises:
        ValueError: no such backend, or it does not run on that device.
    """
    chosen = _AUTO.get(device_type, name) if name == AUTO else name
    if chosen not in BACKENDS:
        raise ValueError(f"unknown DSA backend {name!r}: this release has {', '.join([AUTO, *BACKENDS])}")
    backend = BACKENDS[chosen]
    if device_type not in backend.devices:
        raise ValueError(f"DSA backend {chosen!r} runs on {', '.join(backend.devices)}, not on {device_type!r}")
    return backend
