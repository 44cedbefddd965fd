"""List what data sheets publish about GPUs."""

from dataclasses import dataclass

GIB = 2**30
GPUS_PER_NODE = 8
"""Default of `Cluster.gpus_per_node`."""


@dataclass(frozen=True)
class GPU:
    """A type of GPU.

    Attributes:
        memory: bytes that programs can have, as torch reports them.
        flops: FLOPs per second of dense bf16 matrix products; and of fp32 matrix products, without TF32.
        memory_bandwidth: bytes per second to its own memory.
        link: bytes per second to another GPU of the node, one way.
        network: bytes per second to another node, one way, with the usual one adapter per GPU.
        host: bytes per second to the host's memory, one way.
        capability: compute capability, times ten.
    """

    name: str
    memory: float
    flops: float
    fp32_flops: float
    memory_bandwidth: float
    link: float
    network: float
    host: float
    capability: int


def _gpu(name: str, capability: int, gib: float, tflops: float, fp32_tflops: float, *bandwidths: float) -> GPU:
    """Return a GPU from GiB, 1e12 operations and 1e9 bytes."""
    memory, link, network, host = (1e9 * bandwidth for bandwidth in bandwidths)
    return GPU(name, gib * GIB, tflops * 1e12, fp32_tflops * 1e12, memory, link, network, host, capability)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40gb", 80, 39.4, 312, 19.5, 1555, 300, 25, 25),
        _gpu("a100", 80, 79.2, 312, 19.5, 2039, 300, 25, 25),
        _gpu("a800", 80, 79.2, 312, 19.5, 2039, 200, 25, 25),
        _gpu("h100", 90, 79.1, 989, 67, 3352, 450, 50, 50),
        _gpu("h800", 90, 79.1, 989, 67, 3352, 200, 50, 50),
        _gpu("h20", 90, 95.1, 148, 44, 4000, 450, 50, 50),
        _gpu("h200", 90, 139.8, 989, 67, 4800, 450, 50, 50),
        _gpu("b200", 100, 178.3, 2250, 75, 7700, 900, 50, 50),
        _gpu("l40s", 89, 44.4, 362, 91.6, 864, 25, 25, 25),
        _gpu("rtx4090", 89, 23.5, 165, 82.6, 1008, 25, 12, 25),
    )
}
"""Name that --gpu takes -> GPU; GPUs with NVLink are of the SXM form.

Source: NVIDIA's data sheets of each, dense rates (without sparsity); memory as in messages of torch's allocator.
"""


def find_gpu(device_name: str) -> GPU | None:
    """Return the type of a device by CUDA's name for it, such as "NVIDIA H100 80GB HBM3"; None where it is unknown,
    as the slower PCIe cards are."""
    words = device_name.lower().replace("geforce ", "").replace("rtx ", "rtx").replace("-", " ").split()
    names = [name for name in GPUS if name in words]
    if not names or {"pcie", "nvl"} & set(words):
        return None
    return GPUS.get(f"{names[0]}-40gb" if "40gb" in words else names[0])
