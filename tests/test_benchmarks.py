"""The measuring helpers measure: known times, known allocations, known growth, and what would be wrong is told apart."""

from __future__ import annotations

import functools

import pytest
import torch
from benchmarks import growth, memory, timing


class Toy:
    """A clock that moves only when a toy call says it took its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def call(self, name: str, *took: float):
        left = list(took)

        def run() -> None:
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_quartiles_of_five_values_by_hand():
    assert timing.Spread.of([9.0, 1.0, 5.0, 3.0, 7.0]) == timing.Spread(3.0, 5.0, 7.0)
    assert timing.Spread.of([4.0]) == timing.Spread(4.0, 4.0, 4.0)


def test_times_are_those_of_the_clock_and_the_first_call_is_not_counted():
    toy = Toy()
    times = timing.interleaved(
        {"slow first": toy.call("slow first", 100.0, 2.0), "steady": toy.call("steady", 1.0)},
        budget=1e9,
        least=4,
        most=4,
        clock=lambda: toy.now,
    )
    assert times == {"slow first": [2.0] * 4, "steady": [1.0] * 4}
    assert timing.ratio(times["slow first"], times["steady"]) == timing.Spread(2.0, 2.0, 2.0)


def test_rounds_alternate_in_order_and_end_with_the_budget():
    toy = Toy()
    calls = {"a": toy.call("a", 1.0), "b": toy.call("b", 1.0)}
    timing.interleaved(calls, budget=7.0, least=1, most=100, clock=lambda: toy.now)
    assert "".join(toy.order) == "ab" + "abba" * 2  # 2 s a round: the fourth begins after 6 s, no fifth after 8


def test_a_machine_that_slows_down_does_not_make_one_alternative_slower():
    def slowing(order: str) -> float:
        """Median of a / b on a machine on which the n-th call takes n seconds, whoever makes it."""
        times: dict[str, list[float]] = {"a": [], "b": []}
        for number, name in enumerate(order, 1):
            times[name].append(float(number))
        return timing.ratio(times["a"], times["b"]).middle

    toy = Toy()
    calls = {"a": toy.call("a", 1.0), "b": toy.call("b", 1.0)}
    timing.interleaved(calls, budget=1e9, least=10, most=10, clock=lambda: toy.now)
    assert slowing("".join(toy.order[2:])) == pytest.approx(1.0, abs=0.05)
    # The negative control: one after the other, the second is charged with the slower machine.
    assert slowing("a" * 10 + "b" * 10) < 0.5


def test_peak_memory_of_known_allocations():
    def two_then_one() -> torch.Tensor:
        first = torch.empty(1_000_000, dtype=torch.uint8)
        second = torch.empty(3_000_000, dtype=torch.uint8)
        del first, second
        return torch.empty(2_000_000, dtype=torch.uint8)

    assert memory.peak_bytes(two_then_one) == 4_000_000
    # The negative control: what was there before, and views of it, cost nothing.
    there = torch.zeros(1_000_000)
    assert memory.peak_bytes(lambda: there.view(1000, 1000).mT) == 0


def test_peak_memory_hears_what_a_kernel_allocates_for_itself():
    matrix = torch.eye(100, dtype=torch.float64)
    held = memory.peak_bytes(lambda: torch.linalg.inv(matrix))
    assert held > matrix.nbytes  # the result, and the factors that no caller sees


def test_a_process_grows_by_what_it_fills():
    grown = memory.resident_bytes(functools.partial, torch.ones, 25_000_000, warm=(torch.ones, 1000))
    if grown is None:
        pytest.skip("the system does not tell")
    assert grown == pytest.approx(100e6, rel=0.1)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_exponent_of_a_power_law(power):
    lengths = [1000, 2000, 4000, 8000]
    assert growth.exponent(lengths, [3.0 * n**power for n in lengths]) == pytest.approx(power)


def test_a_constant_does_not_grow():
    assert growth.exponent([1000, 2000, 4000], [5.0, 5.0, 5.0]) == pytest.approx(0.0)


def test_a_missing_peer_is_told_and_an_unknown_benchmark_refused(capsys):
    from benchmarks import bench, peers

    assert peers.version("no-such-package-here") is None
    with pytest.raises(SystemExit) as refused:
        bench.main(["windw"])
    assert refused.value.code == 2
    assert "no benchmark is named windw: there are cost, fused, blocked, window, rope" in capsys.readouterr().err


def test_the_same_numbers_make_the_same_picture():
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    points = {"one": [(1024, 1.0), (2048, 2.0)], "two": [(1024, 1.0), (2048, 4.0)]}
    picture = plot.lines("Growth", "MiB", points)
    assert picture is not None
    assert picture == plot.lines("Growth", "MiB", points)
    assert picture != plot.lines("Growth", "MiB", {**points, "two": [(1024, 1.0), (2048, 3.0)]})
    assert "Growth" in picture
    assert "2k" in picture
