"""Episodes joined to trajectories: an environment's tokens and cuts into segments change no advantage."""

import itertools
from dataclasses import replace

import pytest
import torch

from megappo.batch.rows import NO_TOKENS, Rows
from megappo.batch.trajectories import Trajectories
from megappo.config.methods import ESTIMATORS
from megappo.ppo.advantages import compute_token_level_rewards, estimate, gae, whiten

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
    fields["episodes"] = torch.tensor([float(episode % 2) for episode, *_ in flat])
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


def plain_gae(values: list[float], rewards: list[float], gamma: float, lam: float) -> list[float]:
    found, advantage = [], 0.0
    for value, following, reward in reversed(list(zip(values, [*values[1:], 0.0], rewards, strict=True))):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        found.append(advantage)
    return found[::-1]


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_turns_in_parallel_follow_each_other_in_time(order):
    """An agent's segment has the turns 1 and 4; its two helpers wrote 2 and 3. Another episode is beside it."""
    generator = torch.Generator().manual_seed(5)
    turns = [[1, 1, 1, 0, 0, 4, 4], [2, 2, 2, 2], [3, 3]]
    pieces = [{name: torch.randn(len(row), generator=generator) for name in PER_TOKEN} for row in turns]
    for piece, row in zip(pieces, turns, strict=True):
        piece["turns"], piece["response_mask"] = torch.tensor(row).float(), (torch.tensor(row) > 0).float()
        piece["turn_rewards"] *= piece["response_mask"]
    rows = rows_of([pieces, episodes(2)[:1]]).select([*order, 3])
    trajectories = Trajectories(rows)
    joined = trajectories.joined.fields
    assert joined["turns"][0, :11].tolist() == [1.0] * 3 + [2.0] * 4 + [3.0] * 2 + [4.0] * 2
    assert trajectories.joined.ids[0] == 0, "the agent's row has the last turn"

    values, rewards = {}, {}
    for segment, position in ((0, 0), (0, 1), (0, 2), *((1, i) for i in range(4)), (2, 0), (2, 1), (0, 5), (0, 6)):
        values[segment, position] = float(pieces[segment]["values"][position])
        rewards[segment, position] = float(pieces[segment]["turn_rewards"][position])
    expected = dict(zip(values, plain_gae([*values.values()], [*rewards.values()], 0.99, 0.95), strict=True))
    by_rows = plain_gae([values[key] for key in sorted(values)], [rewards[key] for key in sorted(values)], 0.99, 0.95)
    assert max(abs(a - expected[key]) for a, key in zip(by_rows, sorted(values), strict=True)) > 0.1
    mask = trajectories.joined.response_mask
    advantages, _ = gae(joined["turn_rewards"], joined["values"], mask, 0.99, 0.95)
    found = trajectories.spread(advantages=advantages).fields["advantages"]
    for row, segment in enumerate(order):
        wanted = [expected.get((segment, position), 0.0) for position in range(len(turns[segment]))]
        torch.testing.assert_close(found[row, : len(wanted)], torch.tensor(wanted))


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
