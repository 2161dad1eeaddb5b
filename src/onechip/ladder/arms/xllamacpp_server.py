"""llama.cpp's HTTP server from the PyPI package xllamacpp, on one GGUF file; the arm `llamacpp-pypi` starts it.

Runs in the peer's environment, never in ours. Owns the settings that make llama.cpp fast and comparable: as many slots
as sequences, continuous batching, no reuse of earlier prompts, as many threads as cores.
"""

import argparse
import os
import time

import xllamacpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("gguf")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="tokens a slot")
    parser.add_argument("--threads", type=int, default=0, help="0 is all cores")
    parser.add_argument("--alias", default="", help="name requests carry; the file's without it")
    options = parser.parse_args()
    threads = options.threads or os.cpu_count() or 1
    params = xllamacpp.CommonParams()
    params.model.path = options.gguf
    if options.alias:
        params.model_alias = {options.alias}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context
    params.cont_batching = True
    params.cache_prompt = False
    params.cache_ram_mib = 0  # no copies of finished slots to memory
    params.n_ctx_checkpoints = 0  # nor of their sliding windows
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.warmup = True
    server = xllamacpp.Server(params)
    print(f"listening {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
