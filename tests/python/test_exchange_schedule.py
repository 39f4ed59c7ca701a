"""When fragments are exchanged, and how a model is cut into them."""
import random

from lightcc.core.exchange_schedule import checked, in_fragments


def test_every_fragment_has_its_turn_and_what_is_sent_is_taken_in():
    for sync_every in range(1, 9):
        for fragments in range(1, sync_every + 1):
            for delay in range(sync_every):
                schedule = checked("test", sync_every, fragments, delay)
                began, ended = {}, {}
                for step in range(1, 4 * sync_every + 1):
                    ending, beginning = schedule.at(step)
                    assert len(beginning) <= 1
                    for fragment in beginning:
                        began.setdefault(fragment, []).append(step)
                    for fragment in ending if delay else beginning:
                        ended.setdefault(fragment, []).append(step)
                assert set(began) == set(range(fragments)) and began[fragments - 1][0] == sync_every
                for fragment, steps in began.items():
                    assert steps == list(range(steps[0], 4 * sync_every + 1, sync_every))
                    expected = [step + delay for step in steps if step + delay <= 4 * sync_every]
                    assert ended.get(fragment, []) == expected


def test_fragments_are_of_about_equal_size():
    assert in_fragments([1] * 12, 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert in_fragments([9, 1, 1], 3) == [[0], [1], [2]] and in_fragments([1, 1, 9], 3) == [[0], [1], [2]]
    generator = random.Random(3)
    for _ in range(300):
        sizes = [generator.randrange(20) for _ in range(generator.randrange(1, 12))]
        fragments = generator.randrange(1, len(sizes) + 1)
        parts = in_fragments(sizes, fragments)
        assert [i for part in parts for i in part] == list(range(len(sizes))) and all(parts) and len(parts) == fragments
