# The CPU environment of the tests and the quickstart.
#
#   docker build -f docker/cpu.Dockerfile -t dsa-upcycling:cpu .
#   docker run --rm -it dsa-upcycling:cpu bash examples/quickstart.sh --fast
#
# NOT built by the tests: they have no container runtime. Every package is pinned by requirements/cpu.txt.
FROM python:3.11-slim-bookworm

# Git is what Python packages from source need; nothing is compiled.
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*

# The small torch, where the index offers a CUDA build first.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_NO_CACHE_DIR=1 \
    HF_HUB_OFFLINE=1 \
    WANDB_MODE=offline

WORKDIR /workspace/dsa-upcycling
COPY . .
RUN bash examples/setup_env.sh
ENV PATH=/workspace/dsa-upcycling/.venv/bin:$PATH

CMD ["dsa-upcycle", "doctor"]
