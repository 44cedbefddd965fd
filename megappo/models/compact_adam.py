"""Adam whose states take less memory of the device between its steps: moments in bf16, states in host memory.

megatron-core 0.16.1 has both for GPUs alone, and not together. TransformerEngine 2.11's FusedAdam converts the moments
of all parameters to fp32 for a step, which takes more memory than they save (pytorch/optimizers/fused_adam.py, `step`).
`HybridDeviceOptimizer` computes on the host, in another rounding, and ignores the moments' dtype.
"""

from typing import Any

import torch
from torch import Tensor

from megappo.runtime import platform
from megappo.runtime.host_memory import HostMemory

PART = 2**24
"""Numbers of a parameter that a step has on the device in fp32 at a time: 192 MiB with their moments."""
MAIN, MOMENTS = "master_param", ("exp_avg", "exp_avg_sq")
"""Names of a parameter's states: megatron-core's."""


class CompactAdam:
    """Stands in for the Adam of a DistributedOptimizer, which makes each step, in fp32 on the device, on a part of a
    parameter at a time: where the states lie changes no number.

    Args:
        adam: the optimizer that megatron-core chose. Its groups hold this rank's range of each parameter, flat.
        dtype: dtype of the moments between steps; rounded to nearest.
        offload_fraction: share of the states that is in host memory: whole parameters, the largest first, until it is
            reached.
    Attributes:
        param_groups: with the number of steps as "step".
        state: parameter -> its main parameter in fp32, which is the parameter itself if that is in fp32, and moments.
        host_bytes: bytes of the states in host memory.
    """

    def __init__(
        self,
        adam: torch.optim.Optimizer,
        dtype: torch.dtype,
        offload_fraction: float,
    ):
        self._adam = adam
        self.param_groups = adam.param_groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self.host_bytes = 0
        self._rest_adam()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        remaining = offload_fraction * sum(map(torch.numel, parameters))
        memory = HostMemory()
        for parameter in sorted(parameters, key=torch.numel, reverse=True):
            is_in_fp32 = parameter.dtype == torch.float32
            dtypes = dict.fromkeys(MOMENTS, dtype) | ({} if is_in_fp32 else {MAIN: torch.float32})
            if remaining > 0:
                states = {name: memory.empty(parameter.shape, one) for name, one in dtypes.items()}
                self.host_bytes += sum(state.nbytes for state in states.values())
            else:
                states = {name: torch.empty_like(parameter, dtype=one) for name, one in dtypes.items()}
            remaining -= parameter.numel()
            for name in MOMENTS:
                states[name].zero_()
            self.state[parameter] = {MAIN: parameter.detach()} | states
            self.state[parameter][MAIN].copy_(parameter)
        for group in self.param_groups:
            group["step"] = 0

    def step(self) -> None:
        """Make a step; gradients are the parameters' `decoupled_grad`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                tensors = parameter.detach(), parameter.decoupled_grad, *self.state[parameter].values()
                for weights, gradient, *states in zip(*(one.split(PART) for one in tensors), strict=True):
                    self._step_part(group, weights, gradient, dict(zip(self.state[parameter], states, strict=True)))
            group["step"] += 1
        self._rest_adam()
        if platform.has_cuda():
            torch.cuda.synchronize()  # the host's states are read without the device

    def _step_part(
        self,
        group: dict[str, Any],
        weights: Tensor,
        gradient: Tensor,
        states: dict[str, Tensor],
    ) -> None:
        device = weights.device
        on_device = {
            name: state.to(device, torch.float32, copy=True, non_blocking=True) for name, state in states.items()
        }
        main = on_device[MAIN]
        main.grad = gradient
        steps = torch.tensor(float(group["step"]), device=device)  # torch's Adam counts by parameter, others by group
        self._adam.param_groups = [group | {"params": [main]}]
        self._adam.state = {main: {name: on_device[name] for name in MOMENTS} | {"step": steps}}
        self._adam.step()
        for name, state in states.items():
            state.copy_(on_device[name], non_blocking=True)
        weights.copy_(main)

    def _rest_adam(self) -> None:
        """Release what Adam holds of a parameter."""
        self._adam.param_groups = []
        self._adam.state = {}

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        """Return a state of a parameter, for checkpoints: itself, so that a load can fill it."""
        return self.state[parameter][name]

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of groups, and the number of steps where torch's Adam has it; not the states."""
        groups = [group | {"params": []} for group in self.param_groups]
        return {"state": {0: {"step": torch.tensor(float(groups[0]["step"]))}}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the settings and the number of steps; the states are loaded in place."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= loaded | {"params": group["params"], "step": int(loaded.get("step", 0))}
