"""Expert ids recorded by engines: every form gives the same counts, and what cannot be true is refused in one line."""

import base64
import io
import json

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from megatron_patch.errors import UserError
from megatron_patch.pruning.moe_layers import MoeLayers
from megatron_patch.pruning.routed_experts import count_record, decode, run
from megatron_patch.pruning.statistics import Statistics

LAYERS = MoeLayers("deepseek_v2", 3, (1, 2), 8, 2)  # the tiny base: layer 0 is dense


def recording(tokens: int, seed: int = 0) -> np.ndarray:
    """int32 [tokens, 3, 2]; the dense layer's rows are zero."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, 3, 8)), axis=2)[:, :, :2].astype(np.int32)
    ids[:, 0] = 0
    return ids


def expected(*records: np.ndarray) -> torch.Tensor:
    count = torch.zeros(2, 8, dtype=torch.int64)
    for record in records:
        for token in record:
            for row in (0, 1):
                for expert in token[row + 1]:
                    count[row, expert] += 1
    return count


def text(ids: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(ids, dtype="<i4").tobytes()).decode()


A, B = recording(7, 1), recording(4, 2)


def _npz(path):
    np.savez(path, first=A, second=B)


def _npz_of_bytes(path):
    np.savez_compressed(path, first=A.astype(np.uint8), second=B.astype(np.int16))


def _npz_moe_only(path):
    np.savez(path, first=A[:, 1:], second=B)


def _jsonl_sglang(path):
    rows = [
        {"text": "x", "meta_info": {"routed_experts": text(r), "prompt_tokens": 3, "completion_tokens": len(r) - 2}}
        for r in (A, B)
    ]
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def npy(ids: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(file.getvalue()).decode()


def _jsonl_vllm(path):
    """One response with the prompt's ids apart, one with all in the choice."""
    rows = [
        {"prompt_routed_experts": npy(A[:5]), "choices": [{"text": "x", "routed_experts": npy(A[5:].astype(np.uint8))}]},
        {"prompt_routed_experts": None, "choices": [{"routed_experts": npy(B)}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _jsonl_lists(path):
    path.write_text("".join(json.dumps({"routed_experts": r.tolist()}) + "\n" for r in (A, B)))


def _parquet_lists(path):
    parquet.write_table(pyarrow.table({"routed_experts": [A.tolist(), B.tolist()]}), path)


def _parquet_bytes(path):
    parquet.write_table(pyarrow.table({"routed_experts": [A.tobytes(), B.tobytes()], "other": [1, 2]}), path)


def _parquet_text(path):
    parquet.write_table(pyarrow.table({"routed_experts": [text(A), text(B[:, 1:])]}), path)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_npz, "r.npz"),
        (_npz_of_bytes, "r.npz"),
        (_npz_moe_only, "r.npz"),
        (_jsonl_sglang, "r.jsonl"),
        (_jsonl_vllm, "r.jsonl"),
        (_jsonl_lists, "r.jsonl"),
        (_parquet_lists, "r.parquet"),
        (_parquet_bytes, "r.parquet"),
        (_parquet_text, "r.parquet"),
    ],
)
def test_every_form_gives_the_same_counts(write, name, tiny_base, tmp_path):
    write(tmp_path / name)
    assert run(tiny_base, [tmp_path / name], tmp_path / "s.safetensors") == 0
    got = Statistics.load(tmp_path / "s.safetensors")
    assert (got.layers, got.num_experts, got.top_k, list(got.sources)) == ((1, 2), 8, 2, ["r"])
    assert got.sources["r"].tokens == 11 and not got.sources["r"].has_gates
    assert torch.equal(got.sources["r"].count, expected(A, B))


def test_bytes_that_fit_both_numbers_of_layers_are_taken_as_all_layers():
    """18 ids are 3 tokens of 3 layers; 12 ids 2 tokens of 3 layers, unless 3 tokens are known."""
    assert decode(text(recording(2)), LAYERS, "x").shape == (2, 3, 2)
    assert decode(text(recording(3)[:, 1:]), LAYERS, "x", tokens=3).shape == (3, 2, 2)


def test_sources_from_records_and_from_names(tiny_base, tmp_path):
    rows = [{"routed_experts": A.tolist(), "source": "code"}, {"routed_experts": B.tolist()}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.save(tmp_path / "one.npy", B)
    run(tiny_base, [tmp_path / "r.jsonl", tmp_path / "one.npy"], tmp_path / "s", sources=("chat", "more"))
    got = Statistics.load(tmp_path / "s").sources
    assert {name: part.tokens for name, part in got.items()} == {"code": 7, "chat": 4, "more": 4}


def test_tokens_without_ids_are_left_out_and_counted(tiny_base, tmp_path, capsys):
    ids = A.copy()
    ids[2] = 0  # vLLM's buffer of a token that was not recorded
    ids[5] = -1  # later engines'
    part, skipped = count_record(ids.astype(np.int64), LAYERS, "x")
    assert (part.tokens, skipped) == (5, 2)
    assert torch.equal(part.count, expected(np.delete(ids, [2, 5], axis=0)))
    np.save(tmp_path / "r.npy", ids)
    run(tiny_base, [tmp_path / "r.npy"], tmp_path / "s")
    assert "2 tokens have no ids (not recorded)" in capsys.readouterr().out


def test_expert_0_of_a_moe_layer_counts():
    ids = np.zeros((1, 3, 2), dtype=np.int64)
    ids[0, 1:] = [0, 3]
    part, skipped = count_record(ids, LAYERS, "x")
    assert skipped == 0 and part.count[:, 0].tolist() == [1, 1]


def test_observed_and_recorded_statistics_merge(tiny_base, tmp_path):
    np.save(tmp_path / "r.npy", A)
    run(tiny_base, [tmp_path / "r.npy"], tmp_path / "s")
    one = Statistics.load(tmp_path / "s")
    assert torch.equal(one.merge(one).sources["r"].count, 2 * expected(A))


def _garbage(path):
    path.write_bytes(b"not what it says")


def _empty(path):
    path.write_bytes(b"")


def _save(path, ids, **more):
    np.savez(path, r=ids, **more)


def _with(token, layer, values):
    ids = A.copy()
    ids[token, layer] = values
    return ids


BAD = [
    ("r.npz", _garbage, "must be whole"),
    ("r.npz", _empty, "must be whole"),
    ("r.npy", _garbage, "must be whole"),
    ("r.parquet", _garbage, "must be whole"),
    ("r.parquet", _empty, "must be whole"),
    ("r.jsonl", _garbage, "must be whole"),
    ("r.jsonl", _empty, "must hold a record"),
    ("r.pkl", _garbage, "ends with .npz, .npy, .parquet, .jsonl"),
    ("r.npz", lambda p: _save(p, A.astype(object)), "must be whole"),
    ("r.npz", lambda p: _save(p, A.astype(float)), "must be whole numbers"),
    ("r.npz", lambda p: _save(p, A[:, :, :1]), r"\[tokens, 2 or 3, 2\]: they are int32 \[7, 3, 1\]"),
    ("r.npz", lambda p: _save(p, A[0]), r"they are int32 \[3, 2\]"),
    ("r.npz", lambda p: _save(p, _with(1, 0, [1, 2])), "rows of dense layers must be zero: the layers 0 have ids"),
    ("r.npz", lambda p: _save(p, _with(1, 1, [0, 0])), "token 1 lacks those of layer 1"),
    ("r.npz", lambda p: _save(p, _with(1, 1, [3, 8])), "from 0 to 7: there is 8"),
    ("r.npz", lambda p: _save(p, _with(1, 1, [3, -1])), "from 0 to 7: there is -1"),
    ("r.npz", lambda p: _save(p, _with(1, 1, [3, 3])), "some stand twice"),
    ("r.npz", lambda p: _save(p, np.zeros_like(A)), "all 7 tokens have zeros"),
    ("r.parquet", lambda p: parquet.write_table(pyarrow.table({"ids": [1]}), p), "has a column routed_experts"),
    ("r.jsonl", lambda p: p.write_text('{"meta_info": {}}'), "a line must hold routed_experts"),
    ("r.jsonl", lambda p: p.write_text("[1]"), "a line must hold routed_experts"),
    ("r.jsonl", lambda p: p.write_text('{"routed_experts": "?"}'), "must be base64 of int32"),
    ("r.jsonl", lambda p: p.write_text('{"routed_experts": "AAAA"}'), "must be base64 of int32"),
    ("r.jsonl", lambda p: p.write_text('{"routed_experts": [[1], [1, 2]]}'), "must be base64 of int32 or .npy, or numbers"),
    (
        "r.jsonl",
        lambda p: p.write_text(
            json.dumps({"meta_info": {"routed_experts": text(A), "prompt_tokens": 3, "completion_tokens": 4}})
        ),
        "42 ids are not 6 tokens of 2 or 3 layers",
    ),
]


@pytest.mark.parametrize(("name", "write", "message"), BAD)
def test_refuses_in_one_line(name, write, message, tiny_base, tmp_path):
    write(tmp_path / name)
    with pytest.raises(UserError, match=message) as error:
        run(tiny_base, [tmp_path / name], tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len(str(error.value).splitlines()) == 1


def test_refuses_missing_files_and_names(tiny_base, tmp_path):
    with pytest.raises(UserError, match="must exist"):
        run(tiny_base, [tmp_path / "r.npz"], tmp_path / "s")
    with pytest.raises(UserError, match="1 names for 2 files"):
        run(tiny_base, [tmp_path / "a.npz", tmp_path / "b.npz"], tmp_path / "s", sources=["x"])
