"""`integrations.deepspeed.attach`, on two and three processes by helpers/deepspeed_ranks.py."""

from importlib.util import find_spec

import pytest

from helpers import deepspeed_ranks
from helpers.two_processes import Results, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is the framework that this test is about"),
]


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Results:
    return results(deepspeed_ranks.__file__, tmp_path_factory.getbasetemp(), worker_id, limit=deepspeed_ranks.LIMIT)


EQUAL = [name for name in deepspeed_ranks.CHECKS if name.endswith("_one_process")]
COSTS = ["a_step_sends_nothing_more_and_a_rank_keeps_its_share"]
SAVED = [name for name in deepspeed_ranks.CHECKS if any(word in name for word in ("resumes", "fits", "checkpoint"))]
REFUSED = [name for name in deepspeed_ranks.CHECKS if "refused" in name]
OTHERS = [name for name in deepspeed_ranks.CHECKS if name not in {*EQUAL, *COSTS, *SAVED, *REFUSED}]


def holds(said: Results, name: str) -> None:
    assert name in said, "an earlier check stopped the processes"
    assert said[name] is None, said[name]


@pytest.mark.parametrize("name", EQUAL)
def test_training_and_evaluation_equal_those_of_one_process(said: Results, name: str) -> None:
    holds(said, name)


@pytest.mark.parametrize("name", COSTS)
def test_an_average_costs_memory_for_the_share_of_a_rank_alone(said: Results, name: str) -> None:
    holds(said, name)


@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_carry_the_average(said: Results, name: str) -> None:
    holds(said, name)


@pytest.mark.parametrize("name", deepspeed_ranks.THREE)
def test_three_ranks_go_on_from_what_two_have_saved(said: Results, name: str) -> None:
    holds(said, name)


@pytest.mark.parametrize("name", OTHERS)
def test_the_average_is_that_of_the_masters(said: Results, name: str) -> None:
    holds(said, name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_on_all_ranks(said: Results, name: str) -> None:
    holds(said, name)
