# The OpenAI endpoint. Build from the repository's root:
#   docker build -f deploy/containers/proxy.Dockerfile -t ascend-pd-proxy .
FROM python:3.11-slim
COPY pyproject.toml README.md LICENSE /src/
COPY ascend_pd /src/ascend_pd
COPY connectors /src/connectors
COPY metaserver /src/metaserver
COPY proxy /src/proxy
RUN pip install --no-cache-dir /src && rm -r /src && useradd --system --uid 10001 ascend-pd
USER 10001
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
EXPOSE 8000
ENTRYPOINT ["ascend-pd", "proxy"]
CMD ["/etc/ascend-pd/cluster.yaml"]
