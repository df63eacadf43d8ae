# One engine on Ascend NPUs, on top of an image that has CANN, vLLM, vllm-ascend and torch-npu. Not run on an NPU yet.
# Name the image of your machine; its versions must be those of the cluster file's `engine.versions`:
#   docker build -f deploy/containers/engine-npu.Dockerfile --build-arg VLLM_ASCEND_IMAGE=… -t ascend-pd-engine-npu .
ARG VLLM_ASCEND_IMAGE
FROM ${VLLM_ASCEND_IMAGE}
COPY pyproject.toml README.md LICENSE /src/
COPY ascend_pd /src/ascend_pd
COPY connectors /src/connectors
COPY metaserver /src/metaserver
COPY proxy /src/proxy
# The base packages are small; the image's own vllm, torch and mooncake stay as they are.
RUN pip install --no-cache-dir /src && rm -r /src
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
ENTRYPOINT ["ascend-pd", "engine", "/etc/ascend-pd/cluster.yaml"]
