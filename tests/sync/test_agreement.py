"""Messages when engine and trainer disagree."""

import pytest

from megappo.config.schema import Config
from megappo.config.sections import Sync
from megappo.engines.client import EngineError
from megappo.sync.proof import FAR, check_log_probs

NAN = float("nan")


def config(dtype: str, tolerance: float) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "model", "dtype": dtype},
            "data": {"train_files": ["train.jsonl"]},
            "trainer": {"output_dir": "out"},
            "rollout": {"sync": {"probe_tolerance": tolerance}},
        }
    )


@pytest.mark.parametrize(
    ("dtype", "rounding", "tolerance", "difference"),
    [("bf16", 0.05, 1e-3, 0.02), ("bf16", 0.05, 0.05, 0.26), ("fp32", 0.001, 1e-8, 1e-6), ("fp32", 0.001, 1e-3, NAN)],
)
def test_the_message_names_the_difference_that_rounding_explains(dtype, rounding, tolerance, difference):
    with pytest.raises(EngineError, match="engine does not run the actor's weights") as caught:
        check_log_probs("a probe", difference, config(dtype, tolerance), pytest.fail)
    assert f"by {difference:.3g} on average" in str(caught.value)
    assert f"Rounding in {dtype} explains up to about {rounding}, and up to 5 times that" in str(caught.value)


def test_a_run_is_warned_before_it_is_stopped():
    warnings: list[str] = []
    assert check_log_probs("a probe", 0.05, config("bf16", 0.05), warnings.append) == 0 and not warnings
    assert check_log_probs("a probe", 0.2, config("bf16", 0.05), warnings.append) == 1
    [warning] = warnings
    assert warning.startswith("WARNING: trainer and SGLang engine disagree about the log-probs of a probe by 0.2")
    assert warning.endswith("the run stops beyond 5 times the tolerance")
    with pytest.raises(EngineError):
        check_log_probs("a probe", 0.26, config("bf16", 0.05), warnings.append)


def test_the_key_describes_when_a_run_stops():
    assert f"the run stops at {FAR:g} times this" in Sync.model_fields["probe_tolerance"].description
