"""Ask a running SGLang server and keep its answers with the experts that it chose; called by observe_sglang.sh.

NOT RUN against a real SGLang so far; written from its documented interface (`return_routed_experts`). Needs this package's
environment for the chat template (transformers), and a server started with --enable-return-routed-experts.
"""

import argparse
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="e.g. http://127.0.0.1:30000")
    parser.add_argument("--model", required=True, help="directory of the tokenizer")
    parser.add_argument("--data", required=True, help="JSON lines of {messages} or {text}")
    parser.add_argument("--output", required=True, help="a .jsonl for dsa-upcycle prune observe --from-routed-experts")
    parser.add_argument("--generate", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=32, help="requests at once")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for an answer")
    options = parser.parse_args()

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with open(options.data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]

    def prompt(row: dict) -> list[int]:
        if "messages" not in row:
            ids = tokenizer(row["text"], add_special_tokens=False)["input_ids"]
            return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]
        last_is_answer = row["messages"][-1]["role"] == "assistant"
        messages = row["messages"][:-1] if last_is_answer else row["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(row: dict) -> str:
        body = {
            "input_ids": prompt(row),
            "sampling_params": {"max_new_tokens": options.generate, "temperature": options.temperature},
            "return_routed_experts": True,
        }
        request = urllib.request.Request(
            options.url.rstrip("/") + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=options.timeout) as answer:
            info = json.load(answer)["meta_info"]
        keys = ("routed_experts", "prompt_tokens", "completion_tokens")
        return json.dumps({"meta_info": {key: info.get(key) for key in keys}})

    try:
        with ThreadPoolExecutor(options.workers) as pool, open(options.output, "w", encoding="utf-8") as file:
            for line in pool.map(ask, rows):
                file.write(line + "\n")
    except urllib.error.URLError as error:
        raise SystemExit(f"error: an SGLang server must answer at {options.url}: {error}") from None


if __name__ == "__main__":
    main()
