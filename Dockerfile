# Builds lightcc from these sources on a bare Debian, installs the wheel into a clean image and runs the demo:
#   docker build -t lightcc . && docker run --rm lightcc
# Target mpi has Open MPI and an sshd beside it, for the MPI manifests of examples/kubernetes:
#   docker build --target mpi -t lightcc-mpi .
FROM debian:12 AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv
RUN python3 -m venv /venv
COPY . /lightcc
RUN /venv/bin/pip wheel --no-deps --wheel-dir /wheels /lightcc

FROM debian:12 AS cpu
# An image for CPUs. Another index, or an empty one for PyPI's, brings another build of torch.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url $TORCH_INDEX} \
    torch==2.13.0 numpy scikit-learn matplotlib tqdm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl
COPY examples /examples

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
USER mpiuser
WORKDIR /home/mpiuser

FROM cpu
USER nobody
WORKDIR /tmp
CMD ["lightccrun", "-np", "2", "python", "/examples/pytorch_digits.py", "--output", "/tmp/demo"]
