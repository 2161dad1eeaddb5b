"""Which device programs are compiled for: the one at hand, or a chip that only its compiler stands in for.

libtpu compiles for any TPU by a topology's name, XLA's CUDA compiler for a GPU by a description of it; neither needs
the chip. What comes back is the real executable with its own memory analysis, and every error that the chip's compiler
would raise. Knows no programs.

"tpu-v5e-1", "tpu-v6e-1": pip install 'onechip[tpu]'. "cuda-h200": pip install 'onechip[cuda]'. "cpu": this machine's.
"""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from onechip.errors import ConfigError
from onechip.model.account import Chip, find_chip

_TPU_TOPOLOGIES = {"tpu-v5e-1": ("v5e:1x1", "v5litepod-1"), "tpu-v6e-1": ("v6e:1x1", "v6e-1")}
# The fields of NVIDIA's data sheet and CUDA's device query that XLA's GPU compiler asks for.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
TARGETS = (*_TPU_TOPOLOGIES, "cuda-h200", "cpu")


@dataclass(frozen=True)
class Target:
    """`device` is a jax device, or a topology's stand-in for one. `chip` is None for a CPU: it is what it is.
    `options` are the compiler's, for `lowered.compile`.
    """

    name: str
    platform: str
    device: Any
    chip: Chip | None
    mesh: Any = None
    options: Mapping[str, str] | None = None

    @property
    def sharding(self) -> Any:
        return jax.sharding.SingleDeviceSharding(self.device)

    @property
    def here(self) -> bool:
        """Whether its programs can run in this process."""
        return self.mesh is None

    @contextmanager
    def lowering(self) -> Generator[None]:
        """Around tracing and lowering: TPU kernels ask which chip they are for, and are told by the mesh."""
        if self.mesh is None:
            yield
        else:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                yield


def describe(name: str) -> Target:
    """The target called `name`. Raises ConfigError when it is unknown or its compiler is not installed."""
    if name == "cpu":
        return Target(name, "cpu", jax.local_devices(backend="cpu")[0], None)
    if name not in TARGETS:
        raise ConfigError(f"target {name!r} is unknown; known are {', '.join(TARGETS)}")
    extra = "tpu" if name in _TPU_TOPOLOGIES else "cuda"
    try:
        topology = _tpu(name) if extra == "tpu" else _cuda()
    except (RuntimeError, ImportError, NotImplementedError) as error:
        raise ConfigError(
            f"the compiler for {name} cannot be used: {error}; install it with pip install 'onechip[{extra}]'"
        ) from error
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    platform = "tpu" if extra == "tpu" else "gpu"
    options = _cuda_tools() if extra == "cuda" else None
    return Target(name, platform, topology.devices[0], find_chip(name), mesh, options)


def _tpu(target: str) -> Any:
    topology, accelerator = _TPU_TOPOLOGIES[target]
    # libtpu reads these when it is loaded; without them it asks the metadata server of a cloud VM.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", accelerator),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
    ):
        os.putenv(name, value)
    return topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=(1, 1, 1)
    )


def _cuda() -> Any:
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=_H200
    )


def _cuda_tools() -> dict[str, str]:
    """Where ptxas is: nvidia-cuda-nvcc puts it on nobody's PATH."""
    found = [path for root in sys.path for path in Path(root).glob("nvidia/*/bin/ptxas")]
    return {"xla_gpu_cuda_data_dir": str(found[0].parents[1])} if found else {}
