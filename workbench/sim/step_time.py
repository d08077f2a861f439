"""How long one step of an engine takes, by a roofline over its hardware's figures.

    step = base + per_sequence x sequences
         + max(matrix products at mfu x peak, weights read at mbu_weights x bandwidth)
         + attention of the prompt's tokens at mfu x peak
         + KV cache of decoding sequences read at mbu_kv x bandwidth

A token takes 2 x parameters of products (Kaplan et al., "Scaling Laws for Neural Language Models", 2020), and attention
4 x layers x hidden x context. Tensor parallelism divides work and bytes by its size; the links take no time here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workbench.sim.fleet import FleetSpec, ModelSpec

GB = 1e9


@dataclass(frozen=True, slots=True)
class StepTime:
    """The step's time of one model on one replica; all in seconds, per token, sequence or step.

    Attributes:
        base_s: of every step.
        per_sequence_s: for each running sequence.
        weights_s: to read the weights once.
        per_token_s: products of one token.
        per_attention_s: attention of one prompt token with one token before it.
        per_kv_token_s: to read one token of KV cache.
        kv_capacity_tokens: what the KV cache holds.
    """

    base_s: float
    per_sequence_s: float
    weights_s: float
    per_token_s: float
    per_attention_s: float
    per_kv_token_s: float
    kv_capacity_tokens: int

    @classmethod
    def of(cls, fleet: FleetSpec, model_name: str, class_name: str, tensor_parallel: int) -> StepTime:
        """The roofline of `model_name` on that many devices of a class.

        Raises:
            ValueError: the weights leave no memory for a KV cache.
        """
        model, device, efficiency = fleet.models[model_name], fleet.classes[class_name], fleet.efficiency[class_name]
        flops = device.bf16_tflops * 1e12 * efficiency.mfu * tensor_parallel
        bandwidth = device.bandwidth_tb_s * 1e12 * tensor_parallel
        capacity = kv_capacity_tokens(fleet, model, device.memory_gb, tensor_parallel)
        if capacity < 1:
            raise ValueError(f"{model_name} does not fit {tensor_parallel} x {class_name}")
        return cls(
            base_s=fleet.step_overhead_s.base,
            per_sequence_s=fleet.step_overhead_s.per_sequence,
            weights_s=model.weights_bytes / (bandwidth * efficiency.mbu_weights),
            per_token_s=2.0 * model.parameters_b * 1e9 / flops,
            per_attention_s=4.0 * model.layers * model.hidden / flops,
            per_kv_token_s=model.kv_bytes_per_token / (bandwidth * efficiency.mbu_kv),
            kv_capacity_tokens=capacity,
        )

    def step_s(self, num_decoding: int, decoding_kv: int, prefill_tokens: int, attention: float, num_new: int) -> float:
        """One step.

        Args:
            num_decoding: sequences that decode.
            decoding_kv: tokens of KV cache that these hold.
            prefill_tokens: prompt tokens computed in the step.
            attention: over these, the tokens before each.
            num_new: sequences that the prompt tokens are of.
        """
        products_s = (num_decoding + prefill_tokens) * self.per_token_s
        return (
            self.base_s
            + self.per_sequence_s * (num_decoding + num_new)
            + max(products_s, self.weights_s)
            + attention * self.per_attention_s
            + decoding_kv * self.per_kv_token_s
        )

    def decode_s(self, num_steps: int, num_decoding: int, decoding_kv: int) -> float:
        """So many steps in which nothing but decoding happens: each adds a token to every sequence."""
        growth, first_s = self._decode_curve(num_decoding, decoding_kv)
        return num_steps * (first_s + growth * (num_steps - 1) / 2.0)

    def decode_steps_in(self, length_s: float, num_decoding: int, decoding_kv: int) -> float:
        """How many such steps, and parts of one, are done in `length_s`: the inverse of `decode_s`."""
        growth, first_s = self._decode_curve(num_decoding, decoding_kv)
        linear = first_s - growth / 2.0
        if growth <= 0.0:
            return length_s / linear
        return (math.sqrt(linear * linear + 2.0 * growth * length_s) - linear) / growth

    def _decode_curve(self, num_decoding: int, decoding_kv: int) -> tuple[float, float]:
        """By how much each step is longer than the one before it, and how long the first one is."""
        first_s = self.step_s(num_decoding, decoding_kv, 0, 0.0, 0)
        return num_decoding * self.per_kv_token_s, first_s


def kv_capacity_tokens(fleet: FleetSpec, model: ModelSpec, memory_gb: float, tensor_parallel: int) -> int:
    """Tokens of KV cache beside the weights, in whole blocks."""
    usable = memory_gb * fleet.engine.gpu_memory_utilization * GB * tensor_parallel
    tokens = int((usable - model.weights_bytes) / model.kv_bytes_per_token)
    return max(tokens // fleet.engine.block_size, 0) * fleet.engine.block_size
