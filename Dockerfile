# meanshift with report and explorer. Without CUDA, if the index has such wheels of PyTorch:
#     docker build --build-arg TORCH_INDEX=URL --tag meanshift .
#     docker run --rm --volume "$PWD:/data" meanshift demo
FROM python:3.11-slim

ARG TORCH_INDEX=
ARG EXTRAS=explore
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

WORKDIR /src
# PyTorch first: its layer is the largest one, and a change of the program keeps it.
COPY constraints.txt ./
RUN pip install -c constraints.txt ${TORCH_INDEX:+--no-deps --index-url "$TORCH_INDEX"} torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY meanshift ./meanshift
RUN pip install -c constraints.txt ".[$EXTRAS]"

RUN useradd --create-home --uid 1000 meanshift && mkdir /data && chown meanshift /data
USER meanshift
WORKDIR /data
ENTRYPOINT ["meanshift"]
CMD ["--help"]
