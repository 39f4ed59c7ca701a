# Builds lightcc from these sources on a bare Debian, installs the wheel into a clean image and runs the demo:
#   docker build -t lightcc . && docker run --rm lightcc
FROM debian:12 AS build
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-venv
RUN python3 -m venv /venv
COPY . /lightcc
RUN /venv/bin/pip wheel --no-deps --wheel-dir /wheels /lightcc

FROM debian:12
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
USER nobody
WORKDIR /tmp
CMD ["lightccrun", "-np", "2", "python", "/examples/pytorch_digits.py", "--output", "/tmp/demo"]
