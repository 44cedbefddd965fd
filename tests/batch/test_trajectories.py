"""Episodes joined to trajectories: an environment's tokens and cuts into segments change no advantage."""

from dataclasses import replace

import pytest
import torch

from megappo.batch.rows import NO_TOKENS, Rows
from megappo.batch.trajectories import Trajectories
from megappo.config.methods import ESTIMATORS
from megappo.ppo.advantages import compute_token_level_rewards, estimate, whiten

PER_TOKEN = ("turn_rewards", "values", "kl_penalty", "old_log_probs", "response_mask", "turns")


def episodes(seed: int) -> list[dict[str, torch.Tensor]]:
    """Six of several tokens of the policy each, two to a prompt."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(1, 40, (6,), generator=generator).tolist():
        one = {name: torch.randn(length, generator=generator) for name in PER_TOKEN}
        one["old_log_probs"] = -one["old_log_probs"].abs()
        found.append(one | {"response_mask": torch.ones(length), "turns": torch.ones(length)})
    return found


def rows_of(pieces: list[list[dict[str, torch.Tensor]]]) -> Rows:
    """A row of each piece; the episodes' pieces in order."""
    flat = [(episode, number, piece) for episode, of in enumerate(pieces) for number, piece in enumerate(of)]
    lengths = [len(piece["values"]) for _, _, piece in flat]
    fields = {
        name: torch.nn.utils.rnn.pad_sequence([piece[name] for *_, piece in flat], batch_first=True)
        for name in PER_TOKEN
    }
    fields["segments"] = torch.tensor([float(number) for _, number, _ in flat])
    fields["scores"] = torch.tensor([sum(float(x["turn_rewards"].sum()) for x in pieces[e]) + e for e, *_ in flat])
    fields["bootstrap_values"] = torch.tensor([float(episode) for episode, *_ in flat])
    prompts = torch.tensor([episode // 2 for episode, *_ in flat])
    ids, ones = torch.arange(len(flat)), torch.ones(len(flat), dtype=torch.int64)
    return Rows(ids, prompts, ones, torch.tensor(lengths), NO_TOKENS, fields)


def with_observations(episode: dict[str, torch.Tensor], generator: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """The episode in up to four segments, with tokens of an environment, and anything there, within them."""
    length = len(episode["values"])
    cuts = sorted({0, length, *torch.randint(0, length + 1, (3,), generator=generator).tolist()})
    segments = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        middle = (start + stop) // 2
        gap = int(torch.randint(0, 5, (1,), generator=generator))
        segment = {
            name: torch.cat([values[start:middle], torch.full((gap,), 7.0), values[middle:stop]])
            for name, values in episode.items()
        }
        for name in ("response_mask", "turns", "turn_rewards"):
            segment[name][middle - start : middle - start + gap] = 0
        segments.append(segment)
    return segments


def advantages_of(rows: Rows, name: str) -> Rows:
    trajectories = Trajectories(rows)
    joined, fields = trajectories.joined, trajectories.joined.fields
    mask, scores = joined.response_mask, fields["scores"] - fields["turn_rewards"].sum(dim=1)
    rewards = compute_token_level_rewards(scores, mask, fields["kl_penalty"], 0.1) + fields["turn_rewards"]
    inputs = fields | {"token_level_rewards": rewards, "groups": joined.prompt_ids, "gamma": 0.97, "lam": 0.9}
    inputs |= {"score_components": torch.stack([fields["scores"]] * 2, dim=1), "baselines": fields["scores"]}
    advantages, returns = estimate(ESTIMATORS[name].function, **inputs)
    return trajectories.spread(advantages=whiten(advantages, mask), returns=returns, shaped_scores=fields["scores"])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_observations_and_cuts_change_no_advantage(name):
    """Token for token the same as of the policy's tokens alone; 0 at the environment's."""
    whole = episodes(3)
    plain = advantages_of(rows_of([[episode] for episode in whole]), name)
    generator = torch.Generator().manual_seed(4)
    cut = [with_observations(episode, generator) for episode in whole]
    assert max(map(len, cut)) > 2
    rows = advantages_of(rows_of(cut), name)
    mask = rows.response_mask.bool()
    position = torch.arange(plain.max_response_length) < plain.response_lengths[:, None]
    for field in ("advantages", "returns"):
        torch.testing.assert_close(rows.fields[field][mask], plain.fields[field][position], atol=1e-6, rtol=1e-6)
        assert not rows.fields[field][~mask].any()
    of_segments = plain.fields["scores"].repeat_interleave(torch.tensor([len(segments) for segments in cut]))
    torch.testing.assert_close(rows.fields["shaped_scores"], of_segments)


def test_rows_without_an_environment_stay_themselves():
    rows = rows_of([[episode] for episode in episodes(1)])
    fields = {name: values for name, values in rows.fields.items() if name != "segments"}
    rows = Rows(rows.ids, rows.prompt_ids, rows.prompt_lengths, rows.response_lengths, NO_TOKENS, fields)
    assert Trajectories(rows).joined is rows


def test_what_is_masked_is_as_if_it_were_not_there():
    """Mask one of four single responses: the others' advantages are those without it, and its own are 0."""
    pieces = [[episode] for episode in episodes(1)]
    for of in (0, 3):
        pieces[of][0]["response_mask"] = torch.zeros_like(pieces[of][0]["response_mask"])
    rows = rows_of(pieces)
    fields = {name: values for name, values in rows.fields.items() if name != "segments"}
    rows = replace(rows, prompt_ids=torch.zeros(6, dtype=torch.int64), fields=fields)
    left = [1, 2, 4, 5]
    for name in ("gae", "grpo"):
        found, expected = advantages_of(rows, name), advantages_of(rows.select(left), name)
        torch.testing.assert_close(found.fields["advantages"][left], expected.fields["advantages"])
        assert not found.fields["advantages"][[0, 3]].any() and not found.fields["shaped_scores"][[0, 3]].any()


def test_a_rank_may_have_no_rows():
    rows = rows_of([[episode] for episode in episodes(1)]).select([])
    trajectories = Trajectories(rows)
    assert len(trajectories.joined) == 0 and len(trajectories.spread(shaped_scores=torch.zeros(0))) == 0
