# Builds lightcc from these sources on a bare Debian, installs the wheel beside PyTorch and runs the demo:
#   docker build -t lightcc . && docker run --rm lightcc
# --target cuda: with PyTorch for CUDA 13, for hosts with NVIDIA's driver and container toolkit:
#   docker build --target cuda -t lightcc-cuda . && docker run --rm --gpus all --ipc host lightcc-cuda
# --target mpi: with Open MPI and an sshd beside PyTorch for CPUs, for the MPI manifests of examples/kubernetes.
FROM debian:12 AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv
RUN python3 -m venv /venv
COPY . /lightcc
RUN /venv/bin/pip wheel --no-deps --wheel-dir /wheels /lightcc

FROM debian:12 AS python
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH

FROM python AS cpu
# An index with PyTorch's builds for CPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" torch==2.13.0 numpy scikit-learn matplotlib tqdm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
COPY examples /examples

FROM python AS cuda
RUN pip install --no-cache-dir torch==2.13.0 numpy scikit-learn matplotlib tqdm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
COPY examples /examples
USER 65534
WORKDIR /tmp
CMD ["lightccrun", "-np", "1", "python", "/examples/pytorch_synthetic_benchmark.py"]

FROM cpu AS mpi
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*
# Operators mount keys, which only root may write, at ~/.ssh, and start sshd as user 1000, at a port above 1024. What a
# host's key is nobody can know before.
RUN useradd --create-home --uid 1000 mpiuser && mkdir -p /run/sshd \
    && printf '%s\n' 'Host *' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
       '    LogLevel ERROR' > /etc/ssh/ssh_config.d/pods.conf \
    && printf '%s\n' 'Port 2222' 'PidFile /home/mpiuser/sshd.pid' 'HostKey /home/mpiuser/.ssh/id_rsa' \
       'StrictModes no' 'SetEnv PATH=/venv/bin:/usr/local/bin:/usr/bin:/bin' > /home/mpiuser/.sshd_config \
    && chown mpiuser /home/mpiuser/.sshd_config
USER 1000
WORKDIR /home/mpiuser

FROM cpu
USER 65534
WORKDIR /tmp
CMD ["lightccrun", "-np", "2", "python", "/examples/pytorch_digits.py", "--output", "/tmp/demo"]
