"""Let vLLM answer prompts and record the experts that it chose; called by observe_vllm.sh. Needs vLLM, not this package.

NOT RUN against a real vLLM so far; written from its documented interface (`enable_return_routed_experts`).
"""

import argparse
import base64
import io
import json

import numpy as np


def text_of(ids) -> str | None:
    """Arrays as base64 of a .npy file; what the engine has encoded already stays as it is."""
    if ids is None or isinstance(ids, str):
        return ids
    file = io.BytesIO()
    np.save(file, np.asarray(ids))
    return base64.b64encode(file.getvalue()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="JSON lines of {messages} or {text}")
    parser.add_argument("--output", required=True, help="a .jsonl for dsa-upcycle prune observe --from-routed-experts")
    parser.add_argument("--generate", type=int, default=256)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--at-once", type=int, default=256, help="prompts between two writes")
    options = parser.parse_args()

    from vllm import LLM, SamplingParams

    with open(options.data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    engine = LLM(
        model=options.model,
        tensor_parallel_size=options.tensor_parallel_size,
        max_model_len=options.max_length,
        enable_return_routed_experts=True,
    )
    sampling = SamplingParams(max_tokens=options.generate, temperature=options.temperature)
    with open(options.output, "w", encoding="utf-8") as file:
        for begin in range(0, len(rows), options.at_once):
            part = rows[begin : begin + options.at_once]
            if "messages" in part[0]:
                results = engine.chat([row["messages"] for row in part], sampling)
            else:
                results = engine.generate([row["text"] for row in part], sampling)
            for result in results:
                if result.outputs[0].routed_experts is None:
                    raise SystemExit("error: vLLM recorded no experts; this release or model does not support it")
                response = {
                    "prompt_routed_experts": text_of(getattr(result, "prompt_routed_experts", None)),
                    "choices": [{"routed_experts": text_of(one.routed_experts)} for one in result.outputs],
                }
                file.write(json.dumps(response) + "\n")


if __name__ == "__main__":
    main()
