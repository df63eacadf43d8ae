# One engine on a CPU. Build from the repository's root:
#   docker build -f deploy/containers/engine-cpu.Dockerfile -t ascend-pd-engine-cpu .
# Run with the pool as argument: ascend-pd-engine-cpu --pool prefill
FROM python:3.11-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 libibverbs1 libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu.lock /src/requirements/cpu.lock
# Locked and complete: nothing is resolved. PyTorch's index has the CPU build of the pinned torch.
RUN pip install --no-cache-dir --no-deps --extra-index-url https://download.pytorch.org/whl/cpu -r /src/requirements/cpu.lock
COPY pyproject.toml README.md LICENSE /src/
COPY ascend_pd /src/ascend_pd
COPY connectors /src/connectors
COPY metaserver /src/metaserver
COPY proxy /src/proxy
RUN pip install --no-cache-dir --no-deps /src && rm -r /src && useradd --system --create-home --uid 10001 ascend-pd
USER 10001
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
ENTRYPOINT ["ascend-pd", "engine", "/etc/ascend-pd/cluster.yaml"]
