# Serves the embedded tiny family on a CPU. Build it from the repository's root:
#   docker build -f deploy/serve.Dockerfile -t dflash-serve .
#   docker run --rm -p 8000:8000 dflash-serve
# Another config: docker run … dflash-serve configs/qwen3_4b_dflash.yml decode.batch_size=32
FROM python:3.12-slim
WORKDIR /opt/dflash
COPY . .
RUN pip install --no-cache-dir '.[serve,grammar,hf]' && useradd --create-home dflash
USER dflash
EXPOSE 8000
# On SIGTERM the server drains: running requests finish, and it exits with status 0.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
  "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["dflash", "serve", "--host=0.0.0.0", "--port=8000"]
CMD ["configs/tiny_dflash.yml"]
