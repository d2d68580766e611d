"""The whole command on tiny models: additivity, resuming, generation, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_patch import cli
from megatron_patch.errors import UserError
from megatron_patch.pruning import observe
from megatron_patch.pruning.hooks import ExpertObserver, moe_blocks
from megatron_patch.pruning.load import load_model, load_tokenizer
from megatron_patch.pruning.observe import Settings, parse_shard, run, run_merge, sources_of
from megatron_patch.pruning.prompts import encode_file
from megatron_patch.pruning.statistics import GATE_FIELDS, Statistics, model_sha256
from tests.evaluation.models import edit_json, edit_tensors, make_fake_export
from tests.pruning.models import FAMILIES, small_model, token_rows
from tests.tiny import make_tiny_base, make_tiny_tokenizer

ROOT = Path(__file__).parents[2]


def write_rows(path: Path, number: int, key: str = "text") -> Path:
    texts = [f"row {i} says {'a b ' * (i % 5)}" for i in range(number)]
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def write_chats(path: Path, number: int) -> Path:
    chats = [
        [{"role": "user", "content": f"q{'?' * i}"}, {"role": "assistant", "content": f"a {i}"}] for i in range(number)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


def observed(model: Path, data: dict[str, Path], output: Path, **options) -> Statistics:
    assert run(Settings(model, data, device="cpu", **options), output) == 0
    return Statistics.load(output)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", 20)


def test_statistics_of_a_base(tiny_base, rows, tmp_path, capsys):
    got = observed(tiny_base, {"text": rows}, tmp_path / "s.safetensors", batch_size=3)
    assert (got.model_type, got.layers, got.num_experts, got.top_k) == ("deepseek_v2", (1, 2), 8, 2)
    assert got.model_sha256 == model_sha256(tiny_base)
    ids = encode_file(load_tokenizer(tiny_base), rows).rows
    assert got.sources["text"].tokens == sum(map(len, ids)) and ids[0][0] == 1  # BOS
    assert not list(tmp_path.glob("*.partial"))
    out = capsys.readouterr().out
    assert f"text: {got.sources['text'].tokens} tokens, 2 MoE layers" in out and "written" in out


def test_two_halves_merged_are_the_whole(tiny_base, rows, tmp_path):
    whole = observed(tiny_base, {"rows": rows}, tmp_path / "whole")
    for half in (0, 1):
        observed(tiny_base, {"rows": rows}, tmp_path / f"{half}", shard=(half, 2), batch_size=5)
    assert run_merge([tmp_path / "0", tmp_path / "1"], tmp_path / "both") == 0
    a, b = whole.sources["rows"], Statistics.load(tmp_path / "both").sources["rows"]
    assert a.tokens == b.tokens and torch.equal(a.count, b.count)
    for field in GATE_FIELDS:  # other batches, so other rounding in the matrix products
        torch.testing.assert_close(getattr(a, field), getattr(b, field), rtol=1e-5, atol=1e-7)


def test_each_file_is_a_source(tiny_base, rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", 3)
    got = observed(tiny_base, sources_of([rows, other], []), tmp_path / "s").sources
    assert list(got) == ["rows", "other"] and got["other"].tokens < got["rows"].tokens
    alone = observed(tiny_base, {"other": other}, tmp_path / "alone").sources["other"]
    assert torch.equal(alone.count, got["other"].count)


def test_an_upcycled_export_is_observed_with_its_dsa_layers(tiny_base, rows, tmp_path):
    export = make_fake_export(tmp_path / "export", tiny_base, zeroed=False)
    got = observed(export, {"rows": rows}, tmp_path / "s")
    assert got.layers == (1, 2, 3, 4)
    base = observed(tiny_base, {"rows": rows}, tmp_path / "base")
    assert torch.equal(got.sources["rows"].count[:2], base.sources["rows"].count)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "deepseek_v4"])
def test_other_families_from_their_directories(family, rows, tmp_path):
    model = small_model(family)
    model.save_pretrained(tmp_path / "model")
    make_tiny_tokenizer(tmp_path / "model")
    got = observed(tmp_path / "model", {"rows": rows}, tmp_path / "s")
    assert got.model_type == family and got.layers == tuple(moe_blocks(model))
    observer = ExpertObserver(model, observe.read_moe_layers(tmp_path / "model"))
    for row in encode_file(load_tokenizer(tmp_path / "model"), rows).rows:
        observe.observe_batch(model, observer, [row])
    assert torch.equal(got.sources["rows"].count, observer.statistics.count)


def test_generated_tokens_count(tiny_base, tmp_path):
    """The replies of the model's own greedy decoding, row by row without padding, and their end tokens."""
    chats = write_chats(tmp_path / "chats.jsonl", 6)
    got = observed(tiny_base, {"chats": chats}, tmp_path / "s", chat=True, generate=5, batch_size=4)
    tokenizer, model = load_tokenizer(tiny_base), load_model(tiny_base)
    prompts = encode_file(tokenizer, chats, chat=True, for_reply=True).rows
    assert tokenizer.decode(prompts[1]).endswith("User: q?\n\nAssistant:")
    made = [model.generate(torch.tensor([list(p)]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0] for p in prompts]
    assert got.sources["chats"].tokens == sum(map(len, made)) > sum(map(len, prompts))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_does_not_depend_on_its_batch(family):
    """Prompts are padded on the left to be answered together."""
    model, tokenizer, rows = small_model(family), SimpleNamespace(eos_token_id=2), token_rows(30, 12, 5)
    together = observe._continued(model, tokenizer, rows, 8)
    assert together == [observe._continued(model, tokenizer, [row], 8)[0] for row in rows]
    assert [row[: len(prompt)] for row, prompt in zip(together, rows)] == rows


def test_a_reply_ends_with_its_end_token():
    assert observe._until([5, 2, 2, 2], 2) == [5, 2]
    assert observe._until([5, 6], 2) == [5, 6] and observe._until([5, 6], None) == [5, 6]


def test_chats_without_generation_hold_their_answers(tiny_base, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", 2)
    tokenizer = load_tokenizer(tiny_base)
    assert tokenizer.decode(encode_file(tokenizer, chats, chat=True).rows[1]) == "<bos>User: q?\n\nAssistant: a 1<eos>"


def test_long_rows_are_cut_or_left_out_and_counted(tiny_base, rows, tmp_path, capsys):
    tokenizer = load_tokenizer(tiny_base)
    got = encode_file(tokenizer, rows, max_length=20)
    assert max(map(len, got.rows)) == 20 and got.cut == 10 and got.left_out == 0
    chats = write_chats(tmp_path / "chats.jsonl", 6)
    got = encode_file(tokenizer, chats, chat=True, for_reply=True, max_length=22)
    assert (len(got.rows), got.left_out) == (3, 3)
    observed(tiny_base, {"rows": rows}, tmp_path / "s", max_length=20)
    assert "rows.jsonl: of 20 rows 10 were cut and 0 left out at --max-length 20" in capsys.readouterr().out


def test_a_name_of_a_special_token_in_a_text_is_text(tiny_base, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(json.dumps({"text": "a<eos>"}) + "\n")
    assert 2 not in encode_file(load_tokenizer(tiny_base), file).rows[0]


# Resuming


def test_a_killed_run_resumes_to_the_same_bytes(tiny_base, tmp_path):
    """kill -9 at several moments; what is there afterwards is unfinished statistics that load refuses, or nothing."""
    data = [write_rows(tmp_path / f"{name}.jsonl", 60) for name in ("a", "b")]
    whole = tmp_path / "whole.safetensors"
    run(Settings(tiny_base, sources_of(data, []), batch_size=2, device="cpu"), whole)

    output, partial = tmp_path / "s.safetensors", tmp_path / "s.safetensors.partial"
    command = [sys.executable, "-m", "megatron_patch", "prune", "observe", "--model", str(tiny_base), "--data"]
    command += [*map(str, data), "--batch-size", "2", "--save-interval", "1", "--device", "cpu", "--output", str(output)]
    command += ["--resume"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    kills = 0
    for after in (3, 35):  # saves seen before the kill: in the first source, in the second
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = 0
        while process.poll() is None and done < after:
            time.sleep(0.005)
            if partial.exists():
                done = sum(observe.load_progress(partial)[1]["batches"].values())
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += not output.exists()
        if partial.exists():
            with pytest.raises(UserError, match="did not finish"):
                Statistics.load(partial)
    assert kills >= 1
    if not output.exists():
        run(Settings(tiny_base, sources_of(data, []), batch_size=2, device="cpu"), output, resume=True)
    assert output.read_bytes() == whole.read_bytes() and not partial.exists()


def test_an_interrupted_run_goes_on_where_it_stood(tiny_base, rows, tmp_path, monkeypatch):
    whole = observed(tiny_base, {"rows": rows}, tmp_path / "whole", batch_size=2).sources["rows"]
    real, passes = observe.observe_batch, []

    def failing(*arguments):
        if len(passes) == 5:
            raise KeyboardInterrupt
        passes.append(1)
        real(*arguments)

    monkeypatch.setattr(observe, "observe_batch", failing)
    settings = Settings(tiny_base, {"rows": rows}, batch_size=2, device="cpu", save_interval=2)
    with pytest.raises(KeyboardInterrupt):
        run(settings, tmp_path / "s")
    with pytest.raises(UserError, match=r"did not finish: .*partial is there; go on with --resume"):
        run(settings, tmp_path / "s")
    passes[:] = [1] * 100
    monkeypatch.setattr(observe, "observe_batch", lambda *a: (passes.append(1), real(*a)))
    run(settings, tmp_path / "s", resume=True)
    assert len(passes) == 106, "4 of 10 batches were saved"
    got = Statistics.load(tmp_path / "s").sources["rows"]
    assert all(torch.equal(getattr(got, name), getattr(whole, name)) for name in ("count", *GATE_FIELDS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 4}, "batch_size was 2 and is 4"),
        ({"max_length": 9}, "max_length was 2048 and is 9"),
        ({"data": ...}, "data was"),
        ({"model": ...}, "model_sha256 differs"),
    ],
)
def test_refuses_to_resume_another_run(changes, message, tiny_base, rows, tmp_path):
    same = {"model": tiny_base, "data": {"rows": rows}, "batch_size": 2, "device": "cpu"}
    state = Settings(**same)
    statistics, progress = observe._start(state, observe.read_moe_layers(tiny_base), tmp_path / "none")
    statistics.sources["rows"] = observed(tiny_base, {"rows": rows}, tmp_path / "whole").sources["rows"]
    statistics.save(tmp_path / "s.partial", progress)
    if "data" in changes:
        changes = {"data": {"rows": write_rows(tmp_path / "more.jsonl", 21)}}
    if "model" in changes:
        changes = {"model": make_tiny_base(tmp_path / "other", shards=3)}
        make_tiny_tokenizer(changes["model"])
    with pytest.raises(UserError, match=message):
        run(Settings(**(same | changes)), tmp_path / "s", resume=True)


# Refusals


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a"}', r"rows.jsonl:2: 'text' must be a text: the row has 'txt'; give --text-key, or --chat"),
        ('{"text": 3}', "rows.jsonl:2: 'text' must hold a text: it holds a int; mend or drop the row"),
        ('{"text": ""}', "it holds an empty one"),
        ('{"text": ', "rows.jsonl:2: a line must be a JSON object"),
        ("[1]", "rows.jsonl:2: a line must be a JSON object: it is list"),
        ("\udcff", "must be UTF-8"),
    ],
)
def test_refuses_rows(line, message, tiny_base, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(('{"text": "a"}\n' + line).encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        observed(tiny_base, {"rows": path}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_refuses_data_without_rows(tiny_base, rows, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"must have rows: .*empty.jsonl has none"):
        observed(tiny_base, {"x": tmp_path / "empty.jsonl"}, tmp_path / "s")
    with pytest.raises(UserError, match=r"must have rows that --max-length 2048 and --shard 21/22 leave"):
        observed(tiny_base, {"x": rows}, tmp_path / "s", shard=(21, 22))
    with pytest.raises(UserError, match=r"'messages' must be a list of messages"):
        observed(tiny_base, {"x": rows}, tmp_path / "s", chat=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be 1 or more: 0"),
        ({"generate": -1}, "--generate must be 0 or more: -1"),
        ({"max_length": 0}, "--max-length must be 1 or more"),
        ({"save_interval": 0}, "--save-interval must be 1 or more"),
        ({"shard": (2, 2)}, "--shard must be I/N with 0 <= I < N: 2/2"),
        ({"dtype": "float16"}, "--dtype must be one of"),
        ({"device": "tpu"}, "--device must be one of"),
        ({"data": {}}, "no --data was given"),
    ],
)
def test_refuses_settings(options, message, tiny_base, rows, tmp_path):
    with pytest.raises(UserError, match=message):
        run(Settings(**({"model": tiny_base, "data": {"rows": rows}, "device": "cpu"} | options)), tmp_path / "s")


def test_refuses_models(tiny_base, rows, tmp_path):
    broken = make_tiny_base(tmp_path / "broken")
    make_tiny_tokenizer(broken)
    edit_tensors(broken, "model-00001-of-00002.safetensors", lambda t: t.pop(next(n for n in t if "experts.3" in n)))
    with pytest.raises(UserError, match="in its shard"):
        observed(broken, {"rows": rows}, tmp_path / "s")
    edit_json(broken / "config.json", model_type="deepseek_v41")
    with pytest.raises(UserError, match=r"'deepseek_v41' is not supported; known are deepseek_v2, "):
        observed(broken, {"rows": rows}, tmp_path / "s")
    fewer = make_tiny_base(tmp_path / "fewer", n_routed_experts=4)
    make_tiny_tokenizer(fewer)
    edit_json(fewer / "config.json", n_routed_experts=8)
    with pytest.raises(UserError, match="tensors must be those of its config"):
        observed(fewer, {"rows": rows}, tmp_path / "s")
    small = make_tiny_base(tmp_path / "small", vocab_size=50)
    make_tiny_tokenizer(small)
    with pytest.raises(UserError, match="below vocab_size"):
        observed(small, {"rows": rows}, tmp_path / "s")
    with pytest.raises(UserError, match=r"must hold config\.json: .* does not exist"):
        observed(tmp_path, {"rows": rows}, tmp_path / "s")


def test_refuses_weights_that_give_nan(rows, tmp_path):
    bad = make_tiny_base(tmp_path / "bad", shards=1)
    make_tiny_tokenizer(bad)

    def spoil(tensors):
        tensors["model.layers.1.mlp.experts.3.down_proj.weight"].fill_(torch.nan)

    edit_tensors(bad, "model.safetensors", spoil)
    with pytest.raises(UserError, match="must be finite"):
        observed(bad, {"rows": rows}, tmp_path / "s")


def test_refuses_outputs_sources_and_merges(tiny_base, rows, tmp_path):
    observed(tiny_base, {"rows": rows}, tmp_path / "s")
    with pytest.raises(UserError, match="--output must be a new file"):
        observed(tiny_base, {"rows": rows}, tmp_path / "s")
    with pytest.raises(UserError, match="a part must be added once"):
        run_merge([tmp_path / "s", tmp_path / "s"], tmp_path / "m")
    with pytest.raises(UserError, match="2 names for 1 files"):
        sources_of([rows], ["a", "b"])
    with pytest.raises(UserError, match="sources must differ: rows, rows"):
        sources_of([rows, rows], [])
    with pytest.raises(UserError, match="--data must be files"):
        sources_of([tmp_path / "none.jsonl"], [])
    for shard in ("1", "a/b", "-1/2", "1/2/3"):
        with pytest.raises(UserError, match="--shard must be I/N"):
            parse_shard(shard)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["observe", "--output", "s"], "give one of --data, --from-routed-experts and --merge: none was given"),
        (["observe", "--output", "s", "--data", "a", "--merge", "b"], "--data and --merge was given"),
        (["observe", "--output", "s", "--data", "a"], "--data needs a --model"),
        (["observe", "--output", "s", "--merge", "a", "--model", "m"], "--merge reads no --model: m was given"),
        (["observ"], "unknown command prune observ; did you mean observe"),
        (["observe", "--outptu", "s"], "unknown flag --outptu; did you mean --output"),
    ],
)
def test_mistakes_on_the_command_line(argv, message):
    with pytest.raises(UserError, match=message):
        cli.dispatch(["prune", *argv])


def test_the_command_line_reaches_the_room(tiny_base, rows, tmp_path):
    common = ["--output", str(tmp_path / "s"), "--model", str(tiny_base)]
    other = write_rows(tmp_path / "o.jsonl", 3, key="body")
    assert cli.dispatch(["prune", "observe", *common, "--data", str(other), "--text-key", "body", "--device", "cpu"]) == 0
    assert cli.dispatch(["prune", "observe", "--merge", str(tmp_path / "s"), "--output", str(tmp_path / "m")]) == 0
    assert (tmp_path / "m").read_bytes() == (tmp_path / "s").read_bytes()
