# Images of kfconvert, for the CPU and for NVIDIA GPUs.
#
#   docker build --target cpu --tag kfconvert .          docker run --rm kfconvert doctor
#   docker build --target cuda --tag kfconvert:cuda .    docker run --rm --gpus all kfconvert:cuda doctor
#
# The targets dev and dev-cuda have the packages and compilers for a tree that is mounted on /src: docker-compose.yml
# says how `make dev` and `make jupyter` run them. All have the versions of constraints.txt. pip's torch for Linux
# brings CUDA, so that the images for the CPU are not much smaller.

FROM ubuntu:24.04 AS dev
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV MAKEFLAGS=VENV=/opt/kfconvert PATH=/opt/kfconvert/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN git config --system --add safe.directory /src
COPY Makefile constraints.txt ./
RUN make packages && pip install --constraint constraints.txt jupyterlab
CMD ["bash"]

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS dev-cuda
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        g++ git make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV MAKEFLAGS=VENV=/opt/kfconvert PATH=/opt/kfconvert/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN git config --system --add safe.directory /src
COPY --from=dev /opt/kfconvert /opt/kfconvert
CMD ["bash"]

FROM dev AS wheel
COPY . .
RUN MAX_JOBS="$(nproc)" make dist

FROM dev-cuda AS wheel-cuda
# Nothing says here on which GPUs the image will run; those that are newer than the last one compile its code anew.
ARG KFCONVERT_CUDA_ARCHS="8.0 9.0"
COPY . .
RUN MAX_JOBS="$(nproc)" make dist

FROM ubuntu:24.04 AS cpu
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /constraints.txt
COPY --from=wheel /src/dist /dist
RUN python3 -m venv /opt/kfconvert \
    && /opt/kfconvert/bin/pip install --no-cache-dir --constraint /constraints.txt /dist/*.whl timm
ENV PATH=/opt/kfconvert/bin:$PATH
WORKDIR /work
ENTRYPOINT ["kfconvert"]

# The libraries of CUDA come with torch.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS cuda
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cpu /opt/kfconvert /opt/kfconvert
COPY --from=wheel-cuda /src/dist /dist
RUN /opt/kfconvert/bin/pip install --no-cache-dir --no-deps --force-reinstall /dist/*.whl
ENV PATH=/opt/kfconvert/bin:$PATH
WORKDIR /work
ENTRYPOINT ["kfconvert"]
