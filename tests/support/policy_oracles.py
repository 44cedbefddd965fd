"""Policy losses token by token in Python floats, with gradients by hand, written from the papers."""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from ragged import Case

from megappo.config.methods import POLICY_LOSSES
from megappo.config.schema import Actor
from megappo.observe.metrics import Metric
from megappo.ppo.conventions import DEFAULT, PRESETS, Conventions
from megappo.ppo.losses import policy_loss  # noqa: F401 (for the tests of losses)
from megappo.ppo.reductions import AGGREGATIONS, Metrics

SEQUENCE_METHODS = ("gspo", "gmpo", "sapo")
"""Methods that mean seq-mean-token-mean where the config leaves the aggregation open."""


@dataclass
class Token:
    """One token's loss, its derivative in the token's own log-prob (of the row's loss summed), and flags."""

    loss: float
    slope: float
    ratio: float
    clipped: bool = False
    held: bool = False


@dataclass
class Inputs:
    """Random inputs of a policy loss; log-probs lie on a grid, so that float32 takes their differences exactly."""

    case: Case
    log_probs: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor | None

    @classmethod
    def of(cls, case: Case, scale: float, weighted: bool) -> "Inputs":
        old_log_probs = on_grid(case.numbers(scale))
        log_probs = old_log_probs + on_grid(case.numbers(scale))
        weights = case.numbers().abs() + 0.01 if weighted else None
        return cls(case, log_probs, old_log_probs, case.numbers(), weights)

    def rows(self) -> list[list[tuple[float, float, float, float]]]:
        """Return (log_prob, log_ratio, advantage, weight) of each token of each row."""
        rows = [[] for _ in range(self.case.shape[0])]
        for i, t in self.case.tokens():
            log_prob = float(self.log_probs[i, t])
            weight = 1.0 if self.weights is None else float(self.weights[i, t])
            ratio = log_prob - float(self.old_log_probs[i, t])
            rows[i].append((log_prob, ratio, float(self.advantages[i, t]), weight))
        return rows


def numbers_of(metrics: Metrics) -> dict[str, float]:
    """Return the value of each metric: a sum, or a maximum where it is reduced that way (-inf without tokens)."""
    parts = {name: part if isinstance(part, tuple) else (part, "sum") for name, part in metrics.items()}
    return {name: Metric.of(*part).value for name, part in parts.items()}


def on_grid(x: torch.Tensor) -> torch.Tensor:
    return (x * 1024).round() / 1024


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def limit_of(conventions: Conventions) -> float:
    return math.inf if conventions.log_ratio_clamp is None else conventions.log_ratio_clamp


def bounds(config: Actor) -> tuple[float, float]:
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    return low, config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high


def ppo_clip(log_ratio: float, a: float, config: Actor, limit: float) -> Token:
    low, high = bounds(config)
    ratio = math.exp(clamp(log_ratio, -limit, limit))
    kept = clamp(ratio, 1 - low, 1 + high)
    moves = ratio if abs(log_ratio) <= limit else 0.0
    if kept * a < ratio * a:
        return Token(-kept * a, 0.0, ratio, clipped=True)
    return Token(-ratio * a, -moves * a, ratio)


def clip_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    tokens = []
    for _, log_ratio, a, weight in row:
        token = ppo_clip(log_ratio, a, config, limit)
        if config.clip_ratio_c is not None and a < 0 and token.loss > -config.clip_ratio_c * a:
            token = Token(-config.clip_ratio_c * a, 0.0, token.ratio, token.clipped, held=True)
        tokens.append(weigh(token, weight))
    return tokens


def gspo_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    mean = sum(log_ratio for _, log_ratio, _, _ in row) / len(row)
    return [weigh(ppo_clip(mean, a, config, limit), weight) for _, _, a, weight in row]


def cispo_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    low, high = bounds(config)
    tokens = []
    for log_prob, log_ratio, a, weight in row:
        ratio = math.exp(clamp(log_ratio, -limit, limit))
        kept = clamp(ratio, 1 - low, 1 + high)
        tokens.append(weigh(Token(-kept * a * log_prob, -kept * a, ratio, clipped=kept != ratio), weight))
    return tokens


def sapo_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    tokens = []
    for _, log_ratio, a, weight in row:
        tau = config.tau_pos if a > 0 else config.tau_neg
        ratio = math.exp(clamp(log_ratio, -limit, limit))
        gate = sigmoid(tau * (ratio - 1))
        slope = 4 * gate * sigmoid(-tau * (ratio - 1)) * ratio if abs(log_ratio) <= limit else 0.0
        tokens.append(weigh(Token(-a * gate * 4 / tau, -a * slope, ratio), weight))
    return tokens


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def gpg_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    return [
        weigh(Token(-log_prob * a, -a, math.exp(clamp(log_ratio, -limit, limit))), weight)
        for log_prob, log_ratio, a, weight in row
    ]


def clip_cov_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    tokens = []
    for (_, log_ratio, a, weight), taken in zip(row, chosen, strict=True):
        token = ppo_clip(log_ratio, a, config, limit)
        if taken and not token.clipped:
            token = Token(0.0, 0.0, token.ratio, clipped=True)
        else:
            token.clipped = False
        tokens.append(weigh(token, weight))
    return tokens


def kl_cov_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    tokens = []
    for (_, log_ratio, a, weight), taken in zip(row, chosen, strict=True):
        ratio = math.exp(clamp(log_ratio, -limit, limit))
        token = Token(-ratio * a, -ratio * a if abs(log_ratio) <= limit else 0.0, ratio)
        if taken:
            token.loss += config.ppo_kl_coef * abs(log_ratio)
            token.slope += config.ppo_kl_coef * ((log_ratio > 0) - (log_ratio < 0))
        tokens.append(weigh(token, weight))
    return tokens


def gmpo_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    low, high = bounds(config)
    n = len(row)
    clipped, kept, weight = [], [], 1.0
    for _, log_ratio, a, w in row:
        bounded = clamp(log_ratio, -low, high)
        clipped.append((a > 0 and bounded < log_ratio) or (a < 0 and bounded > log_ratio))
        kept.append(0.0 if a == 0 else bounded if clipped[-1] else log_ratio)
        weight *= w ** (1 / n)
    advantage = sum(a for _, _, a, _ in row) / n
    mean = sum(kept) / n
    ratio = math.exp(clamp(mean, -limit, limit))
    loss = -advantage * ratio * weight
    # The row's loss stands at each of its n tokens, and each log-ratio enters it with 1 / n.
    slopes = [0.0 if held or abs(mean) > limit else loss for held in clipped]
    return [Token(loss, slope, ratio, flag) for slope, flag in zip(slopes, clipped, strict=True)]


def dppo_row(row, config: Actor, limit: float, is_trusted) -> list[Token]:
    """Return REINFORCE with the truncated ratio, on tokens where `is_trusted(p, p_old, A, bound)` holds."""
    low, high = bounds(config)
    largest = math.inf if config.clip_ratio_c is None else config.clip_ratio_c
    tokens = []
    for log_prob, log_ratio, a, weight in row:
        ratio = math.exp(clamp(log_ratio, -limit, limit))
        p, p_old = math.exp(min(log_prob, 0.0)), math.exp(min(log_prob - log_ratio, 0.0))
        slope = -min(ratio, largest) * a
        if is_trusted(p, p_old, a, high if a > 0 else low):
            tokens.append(weigh(Token(slope * log_prob, slope, ratio, held=ratio > largest), weight))
        else:
            tokens.append(Token(0.0, 0.0, ratio, clipped=True))
    return tokens


def dppo_tv_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    return dppo_row(row, config, limit, lambda p, q, a, bound: p - q <= bound if a > 0 else q - p <= bound)


def binary_kl(p_old: float, p: float) -> float:
    return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old + 1e-8) / (1 - p + 1e-8))


def dppo_kl_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    def is_trusted(p: float, p_old: float, a: float, bound: float) -> bool:
        return binary_kl(p_old, p) <= bound or (p <= p_old if a > 0 else p >= p_old)

    return dppo_row(row, config, limit, is_trusted)


def dro_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    return [
        weigh(
            Token(
                config.dro_beta * log_ratio**2 / 2 - log_prob * a,
                config.dro_beta * log_ratio - a,
                math.exp(clamp(log_ratio, -limit, limit)),
            ),
            weight,
        )
        for log_prob, log_ratio, a, weight in row
    ]


def dis_row(row, config: Actor, limit: float, chosen) -> list[Token]:
    low, high = bounds(config)
    tokens = []
    for log_prob, log_ratio, a, weight in row:
        ratio = math.exp(clamp(log_ratio, -limit, limit))
        if 1 - low < ratio < 1 + high:
            tokens.append(weigh(Token(-ratio * a * log_prob, -ratio * a, ratio), weight))
        else:
            tokens.append(Token(0.0, 0.0, ratio, clipped=True))
    return tokens


def weigh(token: Token, weight: float) -> Token:
    token.loss, token.slope = token.loss * weight, token.slope * weight
    return token


ROWS = {
    "clip": clip_row,
    "gspo": gspo_row,
    "clip_turn": gspo_row,  # a row without turns is one turn
    "cispo": cispo_row,
    "sapo": sapo_row,
    "gpg": gpg_row,
    "clip_cov": clip_cov_row,
    "kl_cov": kl_cov_row,
    "gmpo": gmpo_row,
    "dppo_tv": dppo_tv_row,
    "dppo_kl": dppo_kl_row,
    "dro": dro_row,
    "dis": dis_row,
}
assert set(ROWS) == set(POLICY_LOSSES)


def row_coefficients(lengths: list[int], mode: str, max_length: int) -> list[float]:
    """Return the weight of each row's token losses in the aggregate."""
    sequences = max(sum(length > 0 for length in lengths), 1)
    if mode == "token-mean":
        return [1 / max(sum(lengths), 1)] * len(lengths)
    if mode == "token-sum":
        return [1.0] * len(lengths)
    if mode == "seq-mean-token-mean":
        return [1 / sequences / max(length, 1) for length in lengths]
    return [1 / sequences / (max_length if mode == "seq-mean-token-sum-norm" else 1)] * len(lengths)


def mode_of(name: str, config: Actor, conventions: Conventions) -> str:
    if config.loss_agg_mode is not None:
        return config.loss_agg_mode
    return "seq-mean-token-mean" if name in SEQUENCE_METHODS else conventions.loss_agg_mode


def covariance_choice(inputs: Inputs, share: float, band: tuple[float, float]) -> list[list[bool]]:
    """Return the tokens that Clip-Cov and KL-Cov treat separately, per row in the order of its tokens."""
    rows = inputs.rows()
    tokens = [(i, k, a, log_prob) for i, row in enumerate(rows) for k, (log_prob, _, a, _) in enumerate(row)]
    n = len(tokens)
    mean_a, mean_log_prob = sum(x[2] for x in tokens) / n, sum(x[3] for x in tokens) / n
    row_sums = [sum(x[0] for x in row) for row in rows]
    ranked = sorted(
        (-(a - mean_a) * (log_prob - mean_log_prob), -row_sums[i], k, i)
        for i, k, a, log_prob in tokens
        if band[0] < (a - mean_a) * (log_prob - mean_log_prob) < band[1]
    )
    best = {(i, k) for _, _, k, i in ranked[: max(1, int(share * n)) if share else 0]}
    return [[(i, k) in best for k in range(len(row))] for i, row in enumerate(rows)]


def expected(name: str, inputs: Inputs, config: Actor, conventions: Conventions):
    """Return (loss, sum of the absolute terms in it, metrics, gradient [B, R])."""
    limit = limit_of(conventions)
    chosen = [[False] * len(row) for row in inputs.rows()]
    if name == "clip_cov":
        chosen = covariance_choice(inputs, config.clip_cov_ratio, (config.clip_cov_lb, config.clip_cov_ub))
    if name == "kl_cov":
        chosen = covariance_choice(inputs, config.kl_cov_ratio, (-math.inf, math.inf))
    pairs = zip(inputs.rows(), chosen, strict=True)
    rows = [ROWS[name](row, config, limit, flags) if row else [] for row, flags in pairs]
    mode = mode_of(name, config, conventions)
    coefficients = row_coefficients([len(row) for row in rows], mode, inputs.case.shape[1])
    terms = [c * token.loss for c, row in zip(coefficients, rows, strict=True) for token in row]
    gradient = torch.zeros(inputs.case.shape, dtype=torch.float64)
    positions = iter(inputs.case.tokens())
    for c, row in zip(coefficients, rows, strict=True):
        for token in row:
            gradient[next(positions)] = c * token.slope
    flat = [token for row in rows for token in row]
    kl = [-clamp(log_ratio, -limit, limit) for row in inputs.rows() for _, log_ratio, _, _ in row]
    metrics = {
        "pg_clipfrac": sum(token.clipped for token in flat) / len(flat),
        "pg_clipfrac_lower": sum(token.held for token in flat) / len(flat),
        "ppo_kl": sum(kl) / len(flat),
        "ratio": sum(token.ratio for token in flat) / len(flat),
        "ratio_max": max(token.ratio for token in flat),
    }
    return sum(terms), sum(map(abs, terms)), metrics, gradient


def configs() -> st.SearchStrategy[Actor]:
    """Return actor sections with every option that a policy loss reads."""
    epsilon = st.none() | st.floats(0.05, 0.4)
    return st.builds(
        Actor,
        clip_ratio=st.floats(0.05, 0.4),
        clip_ratio_low=epsilon,
        clip_ratio_high=epsilon,
        clip_ratio_c=st.none() | st.floats(1.1, 3.0),
        tau_pos=st.floats(0.5, 2.0),
        tau_neg=st.floats(0.5, 2.0),
        clip_cov_ratio=st.sampled_from([0.0, 0.0002, 0.1, 0.5, 1.0]),
        clip_cov_lb=st.sampled_from([-1.0, 0.0, 0.1]),
        clip_cov_ub=st.sampled_from([0.5, 5.0]),
        kl_cov_ratio=st.sampled_from([0.0, 0.0002, 0.1, 0.5, 1.0]),
        ppo_kl_coef=st.floats(0.0, 2.0),
        dro_beta=st.floats(0.01, 2.0),
        loss_agg_mode=st.none() | st.sampled_from(AGGREGATIONS),
    )


def all_conventions() -> st.SearchStrategy[Conventions]:
    return st.sampled_from([DEFAULT, *PRESETS.values()])
