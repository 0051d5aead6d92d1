"""Rounds: who stands where, when all must return, and which round all save (P10, P12)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from parashard.plan.intervals import IntervalSet
from parashard_coordinator.core.calls import Announcement
from parashard_coordinator.core.membership import ShardRegistration
from parashard_coordinator.core.policies import NO_LIMIT
from parashard_coordinator.core.rounds import Rounds

N, STEPS = 4, 30  # seven whole rounds and a short one
LAST_ROUND = 8  # the one that would follow


def of_incarnation(incarnation: int) -> ShardRegistration:
    return ShardRegistration(incarnation, "host:1", "")


def steps_until(round_: int) -> IntervalSet:
    return IntervalSet([(0, min(STEPS, round_ * N))])


def progress(
    round_: int,
    held: Iterable[int] = (),
    returnable: Iterable[int] = (),
    skipped: Iterable[int] = (),
    chains: Iterable[int] = (),
) -> Announcement:
    """Return where a shard stands that holds some steps of its round, and can return to some besides the first."""
    both, empty = steps_until(round_), IntervalSet((step, step + 1) for step in skipped)
    for step in held:
        both.add(step)
    rounds = frozenset({0, *returnable})
    return Announcement(of_incarnation(0), steps_until(round_), both, empty, rounds, chains=frozenset(chains))


class Book:
    """Rounds, and what the leases know of acks."""

    def __init__(self, *shards: Announcement, every_s: float = 0.0) -> None:
        self.rounds = Rounds(max(1, len(shards)), N, STEPS, every_s)
        self.acknowledged: dict[int, IntervalSet] = {}
        self.incarnations: Counter[int] = Counter()
        for shard, of_shard in enumerate(shards):
            self.note_progress(shard, of_shard)

    def note_progress(self, shard: int, of_shard: Announcement) -> None:
        """A new incarnation of a shard says where it stands: the leases believe that and no more (P3)."""
        self.acknowledged[shard] = of_shard.held.copy()
        self.incarnations[shard] += 1
        self.says(shard, of_shard)

    def says(self, shard: int, of_shard: Announcement) -> None:
        """The present incarnation of a shard speaks again."""
        self.rounds.note_progress(shard, of_shard._replace(registration=of_incarnation(self.incarnations[shard])))

    def decide_rollback(self) -> bool:
        return self.rounds.decide_rollback(lambda shard: self.acknowledged[shard])


def test_shards_that_stand_at_the_same_round_go_on() -> None:
    book = Book(progress(3), progress(3, held=[13]))
    assert (book.decide_rollback(), book.rounds.returning_to, book.rounds.out_of_round()) == (False, None, [])
    assert book.rounds.lease_limit() == NO_LIMIT


def test_a_shard_that_holds_the_round_that_another_has_applied_commits_it_with_the_next_request() -> None:  # P10
    book = Book(progress(3), progress(2, held=range(8, 12)))
    assert (book.decide_rollback(), book.rounds.returning_to) == (False, None)


def test_a_shard_that_lacks_one_step_of_what_another_has_applied_takes_all_back() -> None:  # P12
    book = Book(progress(3, returnable=[1]), progress(2, held=[8, 9, 11], returnable=[1]))
    assert book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.out_of_round()) == (1, [(0, 1), (1, 1)])
    assert (book.rounds.lease_limit(), book.rounds.rollbacks) == (0, 1)
    assert not book.decide_rollback(), "it is decided already"


def test_who_stands_at_the_target_already_stays() -> None:  # P12
    book = Book(progress(4, returnable=[2]), progress(2))
    book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.out_of_round()) == (2, [(0, 2)])


def test_acks_count_that_came_after_a_shard_has_spoken_last() -> None:  # P5
    book = Book(progress(2), progress(2))
    for step in range(8, 12):
        book.acknowledged[1].add(step)
    book.says(0, progress(3))  # it has committed the round; shard 1 speaks again only in a second
    assert (book.decide_rollback(), book.rounds.returning_to) == (False, None)


def test_shards_that_have_a_step_in_different_ways_return_to_before_it() -> None:  # P24
    holds = Book(progress(3, returnable=[1, 3]), progress(2, held=range(8, 12), returnable=[1, 2], skipped=[9]))
    holds.decide_rollback()
    assert holds.rounds.returning_to == 1, "round 2 was not saved by both, and round 3 is of two histories"
    applied = Book(progress(3, returnable=[1, 3]), progress(3, returnable=[1, 3], skipped=[5, 9]))
    applied.decide_rollback()
    assert (applied.rounds.returning_to, applied.rounds.out_of_round()) == (1, [(0, 1), (1, 1)])
    applied.note_progress(0, progress(1))
    applied.note_progress(1, progress(1))
    assert (applied.decide_rollback(), applied.rounds.returning_to) == (True, None)


def test_what_all_have_skipped_and_what_is_only_held_elsewhere_is_no_disagreement() -> None:  # P24
    for other in (progress(3, skipped=[9]), progress(2, held=[8, 9], skipped=[9]), progress(2, held=range(8, 12))):
        book = Book(progress(2, held=range(8, 12), skipped=[9]), other)
        book.decide_rollback()
        assert book.rounds.returning_to is None


def test_nothing_is_decided_before_every_shard_has_spoken() -> None:  # P3
    book = Book(progress(3))
    book.rounds = Rounds(2, N, STEPS, 0.0)
    book.note_progress(0, progress(3))
    assert (book.decide_rollback(), book.rounds.returning_to, book.rounds.common_cut()) == (False, None, None)


def test_where_nothing_was_saved_all_begin_again_where_their_plan_began() -> None:  # P12
    book = Book(progress(5), progress(0))
    book.decide_rollback()
    assert book.rounds.returning_to == 0
    of_a_plan = Book(
        Announcement(of_incarnation(0), steps_until(5), steps_until(5), IntervalSet(), frozenset({3})),
        Announcement(of_incarnation(0), steps_until(4), steps_until(4), IntervalSet(), frozenset({3})),
    )
    of_a_plan.decide_rollback()
    assert of_a_plan.rounds.returning_to == 3, "its shards were cut out of a drained checkpoint of round 3"


def test_a_damaged_checkpoint_of_the_target_moves_the_target_further_back() -> None:  # P12
    book = Book(progress(4, returnable=[1, 2]), progress(1, returnable=[1]))
    book.decide_rollback()
    assert book.rounds.returning_to == 1
    book.says(0, progress(4, returnable=[2]))  # it could not go there, and does not say so any more
    assert book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.out_of_round()) == (0, [(0, 0), (1, 0)])
    assert book.rounds.rollbacks == 1, "one return, to another place"


def test_a_return_ends_when_every_shard_stands_at_its_target_and_not_before() -> None:  # P12
    book = Book(progress(1, returnable=[1]), progress(0, held=[0, 1, 2]))
    book.decide_rollback()
    assert book.rounds.returning_to == 0
    # Shard 0 is being sent to round 0. Meanwhile shard 1 says that it had the fourth step after all, and has committed.
    book.says(1, progress(1, returnable=[1]))
    assert not book.decide_rollback(), "one target, once: the order to shard 0 cannot be called back"
    assert (book.rounds.returning_to, book.rounds.out_of_round()) == (0, [(0, 0), (1, 0)])
    book.note_progress(0, progress(0))
    assert not book.decide_rollback()
    book.note_progress(1, progress(0))
    assert book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.rollbacks) == (None, 1)


def test_an_announcement_that_a_later_one_has_overtaken_changes_nothing() -> None:
    book = Book(progress(2), progress(2))
    book.says(0, progress(1, held=[4]))
    assert (book.decide_rollback(), book.rounds.committed()) == (False, 2 * N)
    book.note_progress(0, progress(1, returnable=[1]))
    assert book.rounds.committed() == N, "a new incarnation replaces what was believed (P3)"


def test_steps_are_committed_when_every_shard_has_them_in_its_weights() -> None:
    book = Book(progress(3), progress(2, held=[8, 9, 10, 11]))
    assert book.rounds.committed() == 2 * N
    book.note_progress(1, progress(2))
    book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.committed()) == (0, 0), "what shards return from is computed again"
    assert Rounds().committed() == 0


def test_the_short_last_round_counts_as_one() -> None:
    book = Book(progress(LAST_ROUND), progress(LAST_ROUND - 1, held=[28, 29]))
    assert (book.decide_rollback(), book.rounds.passed()) == (False, STEPS)
    book.note_progress(1, progress(LAST_ROUND - 1, held=[28], returnable=[7]))
    assert book.decide_rollback()
    assert book.rounds.returning_to == 0


@st.composite
def shards(draw: st.DrawFn) -> list[Announcement]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        round_ = draw(st.integers(0, LAST_ROUND))
        in_round = [step for step in range(round_ * N, min(STEPS, (round_ + 1) * N)) if draw(st.booleans())]
        found.append(progress(round_, in_round, draw(st.sets(st.integers(0, round_)))))
    return found


@given(shards())
def test_wherever_shards_stand_they_find_a_common_round_and_go_on_from_it(all_: list[Announcement]) -> None:  # P12
    book = Book(*all_)
    changed = book.decide_rollback()
    target = book.rounds.returning_to
    assert changed == (target is not None)
    furthest = max(len(s.applied) for s in all_)
    if target is None:
        assert all(next(s.held.missing(0, furthest), None) is None for s in all_)
        return
    reachable = [s.returnable | {-(-len(s.applied) // N)} for s in all_]
    assert target == max(frozenset.intersection(*reachable)), "the newest that all can reach"
    sent = dict(book.rounds.out_of_round())
    assert set(sent.values()) <= {target}
    for shard, round_ in sent.items():
        assert book.rounds.lease_limit() == 0, "nothing is leased meanwhile"
        book.note_progress(shard, progress(round_, returnable=all_[shard].returnable))
        book.decide_rollback()
    assert (book.rounds.returning_to, book.rounds.out_of_round(), book.rounds.rollbacks) == (None, [], 1)


# --- the round that all save ---


def test_the_common_cut_is_the_newest_round_that_every_shard_has_saved() -> None:  # P12
    assert Book(progress(6, returnable=[2, 4, 5]), progress(6, returnable=[2, 4])).rounds.common_cut() == 4
    assert Book(progress(6, returnable=[2]), progress(6)).rounds.common_cut() == 0
    of_a_plan = Book(
        progress(6, returnable=[2]),
        Announcement(of_incarnation(0), steps_until(6), steps_until(6), IntervalSet(), frozenset({1})),
    )
    assert of_a_plan.rounds.common_cut() is None


def test_the_newest_round_before_each_shards_chain_is_kept() -> None:  # P12, P33
    def kept(*of_shards: tuple[list[int], list[int]]) -> list[int]:
        return Book(*(progress(7, returnable=saved, chains=chains) for saved, chains in of_shards)).rounds.kept_rounds()

    saved = [2, 3, 4, 5]
    assert kept((saved, [1, 4]), (saved, [1, 4])) == [3]
    assert kept((saved, [1, 4]), (saved, [3, 5])) == [3, 4], "one of each shard"
    assert kept((saved, [2, 4]), ([2, 4, 5], [2, 5])) == [2, 4], "of rounds that all have saved"
    assert kept((saved, []), (saved, [4])) == [3], "a shard may have no row yet"
    assert kept((saved, [1]), (saved, [2])) == [0], "where the plan began"


def test_the_round_before_a_chain_is_kept_until_that_is_common() -> None:  # P33
    """A chain begins at round 5 on one shard: until both have that round, what counts is the chain of round 4."""
    saved = [2, 3, 4]
    rounds = Book(
        progress(7, returnable=[*saved, 5], chains=[1, 3, 5]), progress(7, returnable=saved, chains=[3])
    ).rounds
    assert (rounds.common_cut(), rounds.kept_rounds()) == (4, [2])
    rounds.note_progress(1, progress(7, returnable=[*saved, 5], chains=[3])._replace(registration=of_incarnation(2)))
    assert (rounds.common_cut(), rounds.kept_rounds()) == (5, [2, 4])


def test_a_job_without_rounds_keeps_none() -> None:
    assert Rounds().kept_rounds() == []
    assert Rounds(2, N, STEPS, 0.0).kept_rounds() == []


def test_the_next_round_is_saved_once_it_is_time_and_before_any_of_it_is_leased() -> None:  # P12
    book = Book(progress(2), progress(2), every_s=30.0)
    assert book.rounds.round_to_save(8, 100.0) is None, "the time begins with the first look"
    assert book.rounds.round_to_save(9, 129.9) is None
    assert book.rounds.round_to_save(9, 130.0) == 3
    assert book.rounds.lease_limit() == 12
    assert book.rounds.round_to_save(12, 131.0) == 3, "told again until the shards know"
    book.rounds.round_announced()
    assert book.rounds.lease_limit() == NO_LIMIT
    assert book.rounds.round_to_save(12, 159.9) is None
    assert book.rounds.round_to_save(12, 160.0) == 4


def test_no_round_is_named_while_shards_return_nor_past_the_end() -> None:
    book = Book(progress(2), progress(0), every_s=30.0)
    book.rounds.round_to_save(0, 0.0)
    book.decide_rollback()
    assert book.rounds.round_to_save(0, 30.0) is None
    whole = Book(progress(7), progress(7), every_s=30.0)
    whole.rounds.round_to_save(28, 0.0)
    assert whole.rounds.round_to_save(28, 30.0) is None, "the end is saved anyway"


def test_without_seconds_no_round_is_named() -> None:
    book = Book(progress(2), progress(2))
    assert [book.rounds.round_to_save(8, now_s) for now_s in (0.0, 1e9)] == [None, None]


def test_what_some_shard_has_in_its_weights_has_passed() -> None:  # P11
    assert Book(progress(2), progress(3, held=[12])).rounds.passed() == 12
    assert Rounds(2, N, STEPS, 0.0).passed() == 0


def test_jobs_without_rounds_never_return_and_keep_no_common_time() -> None:  # P1, P12
    book = Rounds()
    book.note_progress(0, progress(2))
    book.round_announced()
    assert (book.decide_rollback(lambda shard: IntervalSet()), book.returning_to, book.out_of_round()) == (
        False,
        None,
        [],
    )
    assert (book.common_cut(), book.passed(), book.lease_limit()) == (None, 0, NO_LIMIT)
    assert book.round_to_save(0, 1e9) is None
