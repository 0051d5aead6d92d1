"""Incarnations: each is claimed once, whoever asks at the same time, and whatever became of earlier ones (P3)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from parashard import claims
from parashard.claims import claim_incarnation
from parashard.errors import ConfigurationError


def test_the_first_life_is_1_and_each_next_one_is_higher(tmp_path):  # P3
    folder = tmp_path / "made" / "when needed"
    assert [claim_incarnation(folder, "shard-0") for _ in range(4)] == [1, 2, 3, 4]


def test_names_do_not_share_numbers(tmp_path):
    names = ["shard-1", "shard-10", "shard-1.5", "coordinator"]
    assert [claim_incarnation(tmp_path, name) for name in names for _ in range(2)] == [1, 2] * 4


def test_no_number_is_given_twice_however_many_ask_at_once(tmp_path):  # P3
    with ThreadPoolExecutor(8) as threads:
        claimed = list(threads.map(lambda _: claim_incarnation(tmp_path, "shard-0"), range(100)))
    assert sorted(claimed) == list(range(1, 101))


def test_a_number_whose_file_was_lost_is_not_given_again_while_a_higher_one_is_there(tmp_path):
    for _ in range(3):
        claim_incarnation(tmp_path, "shard-0")
    (tmp_path / "shard-0.2").unlink()
    assert claim_incarnation(tmp_path, "shard-0") == 4


@pytest.mark.parametrize("stranger", ["shard-0.txt", "shard-0.", "shard-0", "shard-0.7x", "shard-0.²", "x.9"])
def test_other_files_in_the_folder_do_not_count(tmp_path, stranger):
    (tmp_path / stranger).touch()
    assert claim_incarnation(tmp_path, "shard-0") == 1


def test_a_folder_that_cannot_be_is_the_users_to_fix(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot claim an incarnation of shard-0"):
        claim_incarnation(tmp_path / "file" / "below", "shard-0")


def test_lives_have_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "CLAIMS_MAX", 3)
    assert [claim_incarnation(tmp_path, "shard-0") for _ in range(2)] == [1, 2]
    with pytest.raises(ConfigurationError, match="has had 3 lives"):
        claim_incarnation(tmp_path, "shard-0")
