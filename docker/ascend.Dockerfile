# This project on an Ascend image. The base image brings what fits the machine: CANN, Python 3.11, torch and torch_npu.
#
#   docker build -f docker/ascend.Dockerfile --build-arg BASE_IMAGE=<an image with CANN 9, torch and torch_npu> -t dsa-upcycling:ascend .
#   docker run --rm -it --privileged --network host --shm-size 64g -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro \
#     -v /usr/local/sbin/npu-smi:/usr/local/sbin/npu-smi:ro -v /models:/models -v "$PWD/runs:/workspace/dsa-upcycling/runs" \
#     dsa-upcycling:ascend dsa-upcycle doctor
#
# verl's Ascend images and CANN's own (with torch and torch_npu added) are such bases: docs/ascend.md. NOT built or run: no Ascend
# machine and no container runtime were at hand.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

ARG MINDSPEED_URL=https://gitcode.com/Ascend/MindSpeed.git
ARG MINDSPEED_BRANCH=core_r0.16.0

ENV PIP_NO_CACHE_DIR=1 \
    HF_HUB_OFFLINE=1 \
    WANDB_MODE=offline

# The image's torch and torch_npu go together: nothing may replace them.
RUN python -c "import sys; assert sys.version_info[:2] == (3, 11), sys.version" && \
    pip freeze | grep -iE '^(torch|torch[-_]npu)==' > /tmp/keep.txt && grep -iq 'npu' /tmp/keep.txt

# MindSpeed is not on PyPI. It imports scipy and einops without asking for them.
RUN git clone --depth 1 --branch "${MINDSPEED_BRANCH}" "${MINDSPEED_URL}" /workspace/MindSpeed && \
    pip install --constraint /tmp/keep.txt --no-build-isolation -e /workspace/MindSpeed && \
    pip install --constraint /tmp/keep.txt scipy einops

WORKDIR /workspace/dsa-upcycling
COPY . .
RUN pip install --constraint /tmp/keep.txt -e .

CMD ["dsa-upcycle", "doctor"]
