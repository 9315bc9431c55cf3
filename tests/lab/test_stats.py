"""Intervals: analytic checks, coverage by simulation, pairing, clusters, seeds."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from revise_lab.errors import ConfigError
from revise_lab.lab.stats import Interval, bootstrap, paired, pairs, proportion, ratio


def sample(n: int, seed: int = 0, mean: float = 10.0, sd: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, sd, n)


# --- against closed forms and scipy ----------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_the_normal_one_for_many_values():
    x = sample(2_000)
    found = bootstrap(x, unit="tokens")
    half = 1.959964 * x.std() / np.sqrt(len(x))
    assert found.value == pytest.approx(x.mean(), abs=0)
    assert (found.low, found.high) == pytest.approx((x.mean() - half, x.mean() + half), abs=0.1 * half)
    assert (found.n, found.unit, found.kind) == (2_000, "tokens", "95 % bootstrap over samples")


@pytest.mark.parametrize("statistic", [np.mean, np.median], ids=["mean", "median"])
def test_the_ends_agree_with_scipys_percentile_bootstrap(statistic):
    x = sample(40, seed=3)
    ours = bootstrap(x, statistic, n_resamples=20_000)
    theirs = scipy.stats.bootstrap(
        (x,), statistic, n_resamples=20_000, method="percentile", axis=-1, rng=np.random.default_rng(5)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.04 * (theirs.high - theirs.low))


@pytest.mark.parametrize(("successes", "n"), [(0, 20), (1, 20), (7, 20), (19, 20), (20, 20), (300, 300), (1, 1)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_a_share_has_the_exact_interval(successes, n, confidence):
    found = proportion(successes, n, confidence=confidence)
    exact = scipy.stats.binomtest(successes, n).proportion_ci(confidence, method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), rel=1e-12)
    assert (found.value, found.n) == (successes / n, n)


def test_all_of_300_is_not_certainty():
    found = proportion(300, 300)
    assert found.low == pytest.approx(0.025 ** (1 / 300))
    assert found.high == 1.0


# --- coverage --------------------------------------------------------------------------------------------------------


def test_an_interval_covers_the_truth_about_as_often_as_it_says():
    hits = sum(10.0 in bootstrap(sample(40, seed), seed=seed, n_resamples=400) for seed in range(300))
    assert 0.89 <= hits / 300 <= 0.975


def clustered_sample(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Twenty workflows of two to six rows that share an offset."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, size=20)
    labels = np.repeat(np.arange(20), sizes)
    return rng.normal(0, 1, 20)[labels] + rng.normal(0, 0.3, len(labels)), labels


def test_only_resampling_clusters_covers_when_rows_share_an_offset():
    clusters = rows = 0
    for seed in range(120):
        x, labels = clustered_sample(seed)
        clusters += 0.0 in bootstrap(x, clusters=labels, seed=seed, n_resamples=300)
        rows += 0.0 in bootstrap(x, seed=seed, n_resamples=300)
    assert clusters / 120 >= 0.86
    assert rows / 120 <= 0.78, "rows taken as independent claim far too much"


def test_a_ratio_of_sums_covers():
    hits = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        floor = rng.integers(2, 10, size=40)
        hits += 1.5 in ratio(floor * rng.normal(1.5, 0.3, 40), floor, seed=seed, n_resamples=300)
    assert 0.88 <= hits / 200 <= 0.985


# --- pairing and clusters --------------------------------------------------------------------------------------------


def test_pairing_removes_what_both_policies_share():
    workload = sample(60, sd=5.0)
    a, b = workload + sample(60, 1, 1.0, 0.2), workload + sample(60, 2, 0.0, 0.2)
    difference = paired(a, b, unit="calls")
    assert difference.value == pytest.approx(np.mean(a) - np.mean(b))
    assert difference.low > 0.8
    assert difference.kind == "95 % bootstrap over pairs"
    apart = bootstrap(a, seed=1), bootstrap(b, seed=2)
    assert apart[0].low <= apart[1].high, "unpaired, the same data show nothing"
    assert difference.high - difference.low < (apart[0].high - apart[0].low) / 5


def test_clusters_of_one_are_plain_values_and_one_cluster_says_nothing():
    x = sample(30)
    alone = bootstrap(x, clusters=np.arange(30), n_resamples=3_000)
    plain = bootstrap(x, n_resamples=3_000)
    assert (alone.low, alone.high) == pytest.approx((plain.low, plain.high), abs=0.1)
    assert (alone.n, alone.kind) == (30, "95 % bootstrap over clusters")
    single = bootstrap(x, clusters=["w"] * 30)
    assert (single.n, single.value) == (1, pytest.approx(x.mean()))
    assert np.isnan([single.low, single.high]).all()
    assert "none" in bootstrap([4.0]).kind


def test_cluster_labels_may_come_in_any_order():
    x, labels = clustered_sample(0)
    shuffle = np.random.default_rng(9).permutation(len(x))
    assert bootstrap(x, clusters=labels).n == bootstrap(x[shuffle], clusters=labels[shuffle]).n == 20
    one, other = bootstrap(x, clusters=labels), bootstrap(x[shuffle], clusters=labels[shuffle])
    assert (one.low, one.high) == pytest.approx((other.low, other.high))


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    found = ratio([10, 1], [10, 4], over="workflows")
    assert found.value == pytest.approx(11 / 14)
    assert found.kind == "95 % bootstrap over workflows"
    assert (found.low, found.high) == (0.25, 1.0)
    exact = ratio([2, 4, 6], [1, 2, 3])
    assert (exact.low, exact.value, exact.high) == (2, 2, 2)


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_intervals_and_the_global_state_plays_no_part():
    x = sample(25)
    np.random.seed(1)  # noqa: NPY002
    first = bootstrap(x, seed=4)
    np.random.seed(2)  # noqa: NPY002
    assert bootstrap(x, seed=4) == first == bootstrap(x, seed=np.random.default_rng(4))
    assert bootstrap(x, seed=5) != first
    rng = np.random.default_rng(4)
    assert bootstrap(x, seed=rng) != bootstrap(x, seed=rng), "a generator that is passed in moves on"


def test_large_samples_are_resampled_in_pieces_with_the_same_result_shape():
    x = sample(50_000)
    found = bootstrap(x, n_resamples=90)
    assert found.low < x.mean() < found.high


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bootstrap([]), "not empty"),
        (lambda: bootstrap([[1.0, 2.0]]), "one-dimensional"),
        (lambda: bootstrap([1.0, float("nan")]), "NaN"),
        (lambda: bootstrap([1.0, 2.0], confidence=95), "between 0 and 1"),
        (lambda: bootstrap([1.0, 2.0], clusters=[1]), "1 cluster labels"),
        (lambda: paired([1.0, 2.0], [1.0]), "equally long"),
        (lambda: ratio([1.0, 2.0], [0.0, 0.0]), "denominator of 0"),
        (lambda: ratio([1.0, 2.0], [0.0, 1.0]), "denominator of 0"),
        (lambda: proportion(3, 2), "3 successes of 2"),
        (lambda: proportion(0, 0), "is not a share"),
    ],
)
def test_what_makes_no_interval_is_refused(call, says):
    with pytest.raises(ConfigError, match=says):
        call()


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def frame():
    """Two policies on the same five seeds; twelve calls and eight."""
    rows = [
        {"policy": policy, "seed": seed, "calls": base + seed % 3}
        for policy, base in (("restart", 12), ("revise", 8))
        for seed in (5, 3, 4, 1, 2)
    ]
    return pd.DataFrame(rows)


def test_pairs_are_lined_up_by_workload(frame):
    shuffled = frame.sample(frac=1, random_state=3)
    a, b = pairs(shuffled, "policy", "restart", "revise", "calls", ["seed"])
    assert (a - b).tolist() == [4.0] * 5
    with pytest.raises(ConfigError, match="does not identify a row"):
        pairs(pd.concat([frame, frame]), "policy", "restart", "revise", "calls", ["seed"])
    with pytest.raises(ConfigError, match="1 workloads are there for only one of"):
        pairs(frame.iloc[1:], "policy", "restart", "revise", "calls", ["seed"])
    with pytest.raises(ConfigError, match="only one of"):
        pairs(frame, "policy", "restart", "nobody", "calls", ["seed"])


def test_an_interval_says_what_it_contains():
    one = Interval(1, 0, 2, 5, "s")
    assert 2 in one
    assert 2.1 not in one
    assert one.as_dict() == {"value": 1, "low": 0, "high": 2, "n": 5, "unit": "s", "kind": ""}
