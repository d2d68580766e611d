"""Command lines: flags that are unknown, of a wrong type, out of range, or exclude each other; paths of a wrong kind."""

from tests.bad_input.world import Case, World

TRAINING: dict[str, tuple[list[str], str]] = {
    "an unknown flag": (["--train-itres", "5"], "unknown flag --train-itres; did you mean --train-iters; see pretrain_upcycle.py"),
    "a flag of other tools": (["--num-layers", "27"], "unknown flag --num-layers"),
    "a rate of text": (["--lr", "fast"], "--lr: could not convert string to float: 'fast'"),
    "a rate of NaN": (["--lr", "nan"], "--lr must be finite and not negative: nan"),
    "an infinite rate": (["--lr", "inf"], "--lr must be finite and not negative: inf"),
    "a negative indexer rate": (["--indexer-lr", "-1"], "--indexer-lr must be finite and not negative: -1.0"),
    "a negative seed": (["--seed", "-1"], r"--seed must be from 0 to below 2\*\*32: -1"),
    "no steps": (["--train-iters", "0"], "--train-iters must be positive: 0"),
    "steps of a fraction": (["--train-iters", "1.5"], "--train-iters: invalid literal for int.*'1.5'"),
    "a batch that does not divide": (["--global-batch-size", "3"], "--global-batch-size must be a multiple .* 3 is not"),
    "a time limit of -1": (["--exit-duration-in-mins", "-1"], "--exit-duration-in-mins must be 0 or more: -1.0"),
    "a sequence of one token": (["--seq-length", "1"], "--seq-length must be at least 2: 1"),
    "a split of text": (["--split", "most"], "--split is two or three shares, .* 'most' is not"),
    "a split that leaves none": (["--split", "999,1", "--eval-interval", "1"], "--split 999,1 leaves no validation document"),
    "top-k 0": (["--index-topk", "0"], "--index-topk must be positive: 0"),
    "an index head below RoPE": (["--index-head-dim", "4"], "--index-head-dim must hold the base's 8 RoPE dimensions: 4"),
    "a boolean with a value": (["--bf16", "true"], "every value follows its flag: unexpected 'true'; booleans are"),
    "a flag without its value": (["--lr"], "Missing value for argument '--lr'"),
    "an optional choice": (["--epoch-rows", "4"], "argument '--epoch-rows'. Expected one of 'fresh', 'same';"),
    "an unknown choice": (["--optimizer", "lion"], "invalid choice 'lion' for argument '--optimizer'"),
    "two starts": (["--load", "x", "--pretrained-checkpoint", "y"], "--load and --pretrained-checkpoint exclude each other"),
    "a pattern of another attention": (["--layer-pattern", "mla*3,gqa"], "'gqa' in 'mla.3,gqa'; write e.g."),
    "a pattern that drops a layer": (["--layer-pattern", "mla*2,dsa*2"], "must be the base's 3 mla layers .*: mla.2,dsa.2"),
    "a blend without weights": (["--data-path", "P1", "P2"], "a weight > 0 before each prefix, .* got 'P1 P2'"),
    "base indexers with a pattern": (["--train", "base-indexers", "--layer-pattern", "mla*3"], "without --layer-pattern: mla.3"),
    "base indexers with muon": (["--train", "base-indexers", "--optimizer", "muon"], "muon takes no indexers: muon; use adam"),
    "base indexers recomputed": (["--train", "base-indexers", "--recompute-dsa"], "--recompute-dsa needs DSA layers: --train base"),
    "CUDA that is not there": (["--device", "cuda"], "--device cuda needs a GPU"),
    "NPU": (["--device", "npu"], "--device npu needs torch_npu: it is not installed"),
    "a profile backwards": (["--profile-steps", "5:2"], "--profile-steps must be A:B .* 5:2"),
    "tensor parallel": (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size must be 1.*: 2"),
}  # fmt: skip
PLAN: dict[str, tuple[list[str], str]] = {
    "plan with memory below 0": (["--device-memory-gb", "-4"], "--device-memory-gb must be positive: -4.0"),
    "plan with layers below 0": (["--dsa-layers", "-1"], "--dsa-layers must be 0 or more: -1"),
    "plan that does not divide": (["--devices", "3", "--pipeline-model-parallel-size", "2"], "--devices must be a multiple"),
    "plan to a directory that is none": (["--json", "/no/such/place/x.json"], "cannot use /no/such/place/x.json: No such file"),
}
EVALUATE: dict[str, tuple[list[str], str]] = {
    "evaluate nothing": (["--limit", "0"], "--limit must be 1 or more: 0"),
    "evaluate in batches of 0": (["--batch-size", "0"], "--batch-size must be 1 or more: 0"),
    "evaluate an unknown kind": (["--kind", "distil"], "invalid choice 'distil' for argument '--kind'"),
    "evaluate two models": (["--plan", "p.json"], "exactly one of --model, --endpoint, --plan: --model and --plan given"),
    "evaluate a served base of an upcycled model": (["--base-endpoint", "http://h"], "--base-endpoint is for --kind prune"),
    "evaluate a name without a server": (["--base-endpoint-model", "x"], "--base-endpoint-model names what --base-endpoint"),
    "evaluate a suite that is none": (["--suite", "/no"], "a suite is a directory with a suite.json: '/no' has none"),
}


def _text(w: World, *flags: str) -> list[str]:
    return w.prepare_pretrain(w.file("a.jsonl", '{"text": "a"}\n'), flags=flags)


def _file_in_the_way(w: World) -> str:
    return str(w.file("taken", ""))


def _full(w: World) -> list[str]:
    w.out.mkdir()
    w.file("out/mine", "")
    return w.train()


CASES: dict[str, Case] = {
    **{name: Case(lambda w, f=flags: w.train(*f), message) for name, (flags, message) in TRAINING.items()},
    **{
        name: Case(lambda w, f=flags: ["dsa-upcycle", "plan", "--base", str(w.base), *f], message)
        for name, (flags, message) in PLAN.items()
    },
    **{name: Case(lambda w, f=flags: w.evaluate(*f), message) for name, (flags, message) in EVALUATE.items()},
    "evaluate a plan that is not there": Case(lambda w: w.evaluate_plan(w.path / "no.json"), "--plan must be a file of `prune plan`"),
    "evaluate a plan that is none": Case(
        lambda w: w.evaluate_plan(w.file("p.json", '{"schema": 1}')), r"--plan must be a file of `prune plan`: .*KeyError\('layers'\)"
    ),
    "a dry run over nothing": Case(lambda w: w.prune_plan("--dry-run", "/no"), "--dry-run must be a file of JSON lines: /no is none"),
    "a dry run over another key": Case(
        lambda w: w.prune_plan("--dry-run", str(w.file("t.jsonl", '{"body": "x"}'))), r"t\.jsonl:1: 'text' must be a text: .*--text-key"
    ),
    "a dry run over no JSON": Case(
        lambda w: w.prune_plan("--dry-run", str(w.file("t.jsonl", "{"))), r"t\.jsonl:1: a line must be a JSON object"
    ),
    "a dry run's flag without one": Case(lambda w: w.prune_plan("--batch-size", "4"), "--batch-size is of a --dry-run: none was"),
    "a dry run on no such device": Case(
        lambda w: w.prune_plan("--dry-run", str(w.file("t.jsonl", '{"text": "x"}')), "--device", "npu"), "--device npu needs torch_npu"
    ),
    "required flags missing": Case(lambda w: ["sft_upcycle"], "required and missing: --base-model, --data-path, --train-iters"),
    "an unknown command": Case(lambda w: ["dsa-upcycle", "exprot"], "unknown command exprot; did you mean export; commands"),
    "an unknown flag of a script": Case(lambda w: ["prepare_sft", "--seq-lenght", "9"], "did you mean --seq-length"),
    "no input": Case(lambda w: w.prepare_pretrain(), "at least one input file is needed|--input.*[Mm]issing"),
    "an input that is not there": Case(lambda w: w.prepare_pretrain("no.jsonl"), "must exist: 'no.jsonl' is not a file"),
    "a directory as input": Case(
        lambda w: ((w.path / "d.jsonl").mkdir(), w.prepare_pretrain(w.path / "d.jsonl"))[1], "d.jsonl' is not a file"
    ),
    "one input twice": Case(lambda w: w.prepare_pretrain(*[w.file("a.jsonl", "{}")] * 2), "is given twice; remove one"),
    "no workers": Case(lambda w: _text(w, "--workers", "0"), "--workers must be at least 1: 0"),
    "output prefix in a file": Case(
        lambda w: _text(w, "--output-prefix", _file_in_the_way(w) + "/P"), "cannot use .*taken.*check the path"
    ),
    "output prefix that is a folder": Case(lambda w: _text(w, "--output-prefix", f"{w.path}/"), "names a folder; append a name"),
    "no output prefix": Case(lambda w: _text(w, "--output-prefix", ""), "--output-prefix ends in the name of P.bin: ''"),
    "output that exists": Case(
        lambda w: (w.out.mkdir(), w.file("out/P.idx", "mine"), _text(w))[2], r"must not exist yet: .*P\.idx does"
    ),
    "a dropped row under --strict": Case(
        lambda w: w.prepare_pretrain(w.file("a.jsonl", '{"text": "a"}\n{"text": ""}\n'), flags=["--strict"]),
        r"a\.jsonl:2: empty text, and --strict allows no dropped row",
    ),
    "a base that is a file": Case(lambda w: w.train("--base-model", _file_in_the_way(w)), "config.json must be JSON: .*taken"),
    "a tokenizer that is none": Case(lambda w: _text(w, "--tokenizer", str(w.path)), "a tokenizer is a directory with"),
    "SFT output in a file": Case(
        lambda w: w.chats({"messages": []}, flags=["--output", _file_in_the_way(w)]), "taken is something else; give another"
    ),
    "SFT overlong policy": Case(lambda w: w.chats({"messages": []}, flags=["--overlong", "keep"]), "invalid choice 'keep' for argument '--overlong'"),
    "samples longer than the run": Case(
        lambda w: w.train("--seq-length", "20", kind="sft"), r"must fit --seq-length: .* one of \d+ tokens, --seq-length is 20"
    ),
    "chats for pretraining": Case(lambda w: w.train(data=w.copy("chats")), r"chats\.json is not readable"),
    "text for SFT": Case(lambda w: w.train(kind="sft", data=w.prefix), r"has no readable meta\.json"),
    "save in a file": Case(lambda w: w.train("--save", _file_in_the_way(w)), "--save must be a directory: .*taken is a file"),
    "save in a full directory": Case(_full, "--save must be new or empty: .* is not"),
    "TensorBoard in a file": Case(
        lambda w: w.train("--tensorboard-dir", _file_in_the_way(w)), "--tensorboard-dir must be a directory: .*taken"
    ),
    "show no samples": Case(lambda w: ["show_samples", str(w.prefix), "--n", "0"], "--n must be positive: 0"),
    "demo-base in a file": Case(
        lambda w: ["dsa-upcycle", "demo-base", "--output", _file_in_the_way(w), "--fast"], "taken is something else"
    ),
    "export with an unknown layout": Case(lambda w: w.export("--layout", "flat"), "invalid choice 'flat' for argument '--layout'"),
    "base indexers in SFT": Case(lambda w: w.train("--train", "base-indexers", kind="sft"), "learn from text: .* use pretrain_up"),
    "base indexers for the hybrid": Case(
        lambda w: w.export("--base-indexers", str(w.copy("indexers"))), "belong to the native layout, .*: --layout is hybrid; add"
    ),
    "export natively by links": Case(
        lambda w: w.export("--layout", "native", "--base-shards", "symlink"), "--layout native renames a tensor of each layer; use copy"
    ),
    "an export of nothing": Case(lambda w: w.export("--checkpoint", str(w.path)), "has none; give the --save directory"),
}  # fmt: skip
