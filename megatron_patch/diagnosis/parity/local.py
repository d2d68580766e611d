"""Each module of a side against the judge, on the side's own inputs: which one is not what it should be.

A difference counts when rounding does not explain it. What rounding explains is measured, not assumed: the judge in the
side's dtype against the judge in fp64, on the same inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_patch.diagnosis.parity.judge import RIGHT, Judge, Pack, Variant
from megatron_patch.diagnosis.parity.records import Dump, next_tokens, selected_of
from megatron_patch.diagnosis.parity.weights_reader import LayerWeights, ModelShape, read_shape
from megatron_patch.io.safetensors_dir import SafetensorsDir

# In the order in which a layer computes them.
MODULES = ("input", "norm", "indexer", "attention", "post_norm", "router", "experts", "shared", "mlp", "output")
HEAD = "log_probs"
# Two right implementations differ from the truth by about the same; kernels that add in another order by a few times that.
NOISE_FACTOR = 4.0
GAIN_FACTOR = 6.0
TIE = 1e-5  # of the larger score: closer than this, two experts may change places


@dataclass(frozen=True)
class Distance:
    """Of a result x from the truth t: RMS of x - t over RMS of t, and the gain x.t / t.t, 1 if nothing is scaled."""

    relative: float
    gain: float

    @classmethod
    def between(cls, x: Tensor, truth: Tensor) -> "Distance":
        """NaN if x is not finite; (0, 1) if both are 0."""
        x, truth = x.double().flatten(), truth.double().flatten()
        power = float(truth @ truth)
        if not power:
            return cls(float("inf") if x.any() else 0.0, 1.0)
        return cls(float((x - truth).norm()) / power**0.5, float(x @ truth) / power)


@dataclass(frozen=True)
class Local:
    """A module of one side: its distance from the judge in fp64, and the judge's own in the side's dtype.

    Rounding errors point anywhere, a wrong factor or epsilon in one direction: over thousands of values the gain shows
    it far below the size of a single error. `left_out`: tokens that were not compared, because rounding may route them otherwise.
    """

    layer: int
    module: str
    found: Distance
    rounding: Distance
    values: int
    dtype: torch.dtype
    left_out: int = 0

    @property
    def relative(self) -> float:
        return self.found.relative

    @property
    def limit(self) -> float:
        """The largest relative difference that rounding explains."""
        return NOISE_FACTOR * self.rounding.relative + torch.finfo(self.dtype).eps / 4

    @property
    def gain_limit(self) -> float:
        """The largest distance of the gain from 1 that it explains."""
        chance = self.rounding.relative / max(self.values, 1) ** 0.5
        return GAIN_FACTOR * (chance + abs(self.rounding.gain - 1)) + torch.finfo(self.dtype).eps / 64

    @property
    def off_gain(self) -> float:
        """Distance of the gain from 1."""
        return abs(self.found.gain - 1)

    @property
    def diverges(self) -> bool:
        return not (self.relative <= self.limit and self.off_gain <= self.gain_limit)  # NaN diverges

    def __str__(self) -> str:
        if self.relative <= self.limit and self.diverges:
            return f"gain {self.found.gain:.7f} where the definition has 1, rounding explains {self.gain_limit:.1e}"
        return f"{self.relative:.1e} from the definition, rounding explains {self.limit:.1e}"


class LocalJudge:
    """Compares the records of a side with the judge.

    Args:
        dump: the side, with records of modules.
        directory: Hugging Face directory with the weights.
    """

    def __init__(self, dump: Dump, directory: Path):
        self.dump = dump
        self.shape: ModelShape = read_shape(directory)
        self.source = SafetensorsDir(directory)
        self.pack = Pack.of(dump.cu_seqlens)
        self.scored = scored_pairs(self.pack, dump.cu_seqlens, dump.topk)

    def weights(self, layer: int) -> LayerWeights:
        return LayerWeights(self.source, layer, self.dump.torch_dtype)

    def judge(self, dtype: torch.dtype, variant: Variant = RIGHT) -> Judge:
        return Judge(self.shape, self.pack, dtype, variant, plain_queries=self.dump.side.startswith("trainer"))

    def __call__(self, progress: bool = True) -> list[Local]:
        """Every recorded module, bottom to top, then the log-probs."""
        found = []
        for layer in tqdm(self.dump.layers, desc=f"judge the {self.dump.side}", unit="layer", disable=not progress):
            records = self.dump.layer(layer)
            found += [
                self.compare(layer, module, records)
                for module in MODULES
                if module in records and self.comparable(module)
            ]
        if f"layers.{self.shape.layers - 1}.output" in self.dump.tensors:
            found.append(self._head())
        return found

    def comparable(self, module: str) -> bool:
        """Whether there is anything to compare."""
        return module != "indexer" or bool(self.scored.any())

    def compare(self, layer: int, module: str, records: dict[str, Tensor], variant: Variant = RIGHT) -> Local:
        """One module; with a variant, how far the side is from that deviation."""
        w = self.weights(layer)
        if module == "input":
            return self._input(layer, records["input"])
        recorded, keep = self.recorded(module, records, w, variant)
        truth = self.computed(module, records, w, self.judge(torch.float64, variant))[keep]
        rounded = self.computed(module, records, w, self.judge(self.dump.torch_dtype, variant))[keep]
        found, rounding = Distance.between(recorded[keep], truth), Distance.between(rounded, truth)
        left_out = int((~keep).sum()) if module == "router" else 0
        return Local(layer, module, found, rounding, truth.numel(), self.noise_dtype(module), left_out)

    def _input(self, layer: int, found: Tensor) -> Local:
        """A layer's input is the output of the one below, or the tokens' embeddings, to the last bit."""
        if layer:
            truth = self.dump.tensors[f"layers.{layer - 1}.output"]
        else:
            truth = self.source.load("model.embed_tokens.weight").to(self.dump.torch_dtype)[self.dump.tokens]
        return Local(layer, "input", Distance.between(found, truth), Distance(0.0, 1.0), truth.numel(), self.dump.torch_dtype)

    def noise_dtype(self, module: str) -> torch.dtype:
        """The dtype in which a module's result is rounded."""
        return torch.float32 if module in ("router", "indexer") else self.dump.torch_dtype

    def recorded(self, module: str, records: dict[str, Tensor], w: LayerWeights, variant: Variant) -> tuple[Tensor, Tensor]:
        """(the side's result, bool mask of what to compare)."""
        value = records[module]
        if module == "indexer":
            return value, self.scored
        if module == "router":
            return value, ~self.ties(records, w, variant)
        return value, torch.ones(len(value), dtype=torch.bool)

    def ties(self, records: dict[str, Tensor], w: LayerWeights, variant: Variant) -> Tensor:
        """bool [T]: tokens for which the side chose other experts than the judge, and rounding may do so."""
        judge = self.judge(torch.float64, variant)
        weights, choice = judge.router(records["post_norm"], w)
        differ = ((weights > 0) != (records["router"] > 0)).any(-1)
        return differ & (margins(choice, judge.shape.experts_per_token) < TIE)

    @staticmethod
    def computed(module: str, records: dict[str, Tensor], w: LayerWeights, judge: Judge) -> Tensor:
        """The judge's result from the side's inputs of the module."""
        return COMPUTE[module](judge, records, w)

    def _head(self) -> Local:
        targets, predicts = next_tokens(self.dump.tokens, self.dump.cu_seqlens)
        hidden = self.dump.tensors[f"layers.{self.shape.layers - 1}.output"]
        norm, head = (self.source.load(name).to(self.dump.torch_dtype) for name in ("model.norm.weight", "lm_head.weight"))
        truth, rounded = (
            self.judge(dtype).log_probs(hidden, norm, head, targets)[predicts] for dtype in (torch.float64, self.dump.torch_dtype)
        )
        found = self.dump.tensors["log_probs"][predicts]
        return Local(
            self.shape.layers,
            HEAD,
            Distance.between(found, truth),
            Distance.between(rounded, truth),
            truth.numel(),
            self.dump.torch_dtype,
        )


def scored_pairs(pack: Pack, cu_seqlens: Tensor, topk: int | None) -> Tensor:
    """bool [T, T]: pairs whose index score every side computes: causal, in documents longer than top-k."""
    long = (cu_seqlens.long().diff() > (topk or 0))[pack.document]
    return pack.allowed & long[:, None]


def margins(choice_TX: Tensor, k: int) -> Tensor:
    """[T]: the k-th score minus the next, over the k-th's size; infinite if k is all."""
    if k >= choice_TX.size(-1):
        return torch.full((len(choice_TX),), float("inf"), dtype=choice_TX.dtype)
    top = choice_TX.topk(k + 1, dim=-1).values
    return (top[:, k - 1] - top[:, k]) / top[:, k - 1].abs().clamp_min(1e-30)


def _attention(judge: Judge, r: dict[str, Tensor], w: LayerWeights) -> Tensor:
    return judge.attention(r["norm"], w, selected_of(r["indices"]) if "indices" in r else None)


def _sum(judge: Judge, *parts: Tensor) -> Tensor:
    total = parts[0].to(judge.dtype)
    for part in parts[1:]:
        total = total + part.to(judge.dtype)
    return total


def _output(judge: Judge, r: dict[str, Tensor], w: LayerWeights) -> Tensor:
    mlp = [r["mlp"]] if "mlp" in r else [_sum(judge, r["experts"], r["shared"])]
    return _sum(judge, _sum(judge, r["input"], r["attention"]), *mlp)


COMPUTE: dict[str, Callable[[Judge, dict[str, Tensor], LayerWeights], Tensor]] = {
    "norm": lambda j, r, w: j.rms_norm(r["input"], w["input_layernorm.weight"], j.shape.eps),
    "indexer": lambda j, r, w: j.index_scores(r["norm"], w),
    "attention": _attention,
    "post_norm": lambda j, r, w: j.rms_norm(
        _sum(j, r["input"], r["attention"]), w["post_attention_layernorm.weight"], j.shape.eps
    ),
    "router": lambda j, r, w: j.router(r["post_norm"], w)[0],
    "experts": lambda j, r, w: j.experts(r["post_norm"], w, r["router"]),
    "shared": lambda j, r, w: j.shared(r["post_norm"], w),
    "mlp": lambda j, r, w: j.mlp(r["post_norm"], w, "mlp"),
    "output": _output,
}


def first_diverging(rows: list[Local]) -> Local | None:
    """The lowest module that rounding does not explain."""
    return next((row for row in rows if row.diverges), None)
