from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.plan.schedule.knapsack import IndexedQueue

AMOUNTS = st.integers(0, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("replace"), st.integers(0, 500), st.integers(1, 200), AMOUNTS),
        st.tuples(st.just("look"), AMOUNTS, AMOUNTS, AMOUNTS),
    ),
    max_size=15,
)


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(1, 700), STEPS)
def test_first_agrees_with_a_linear_search(count, steps):
    entries = sorted((float(i * 7 % 11), i, i % 5, i % 7, i % 3, "") for i in range(count))
    queue, number = IndexedQueue(entries), count
    for step, *values in steps:
        if step == "look":
            compute, memory, cores = values
            fitting = (e for e in entries if e[2] <= compute and e[3] <= memory and e[4] <= cores)
            assert queue.first(compute, memory, cores) == next(fitting, None)
            continue
        place, times, amount = values
        for gone in entries[place : place + times]:  # as a device whose amounts change: it moves behind others
            new = (gone[0] + 3.0, number, amount, *gone[3:])
            queue.replace(gone, new)
            entries[entries.index(gone)] = new
            number += 1
        entries.sort()
    for limits in [(amount, amount, amount) for amount in range(7)]:
        expected = next((e for e in entries if all(e[2 + i] <= limits[i] for i in range(3))), None)
        assert queue.first(*limits) == expected


def test_with_sorted_compute_the_first_excess_ends_the_search():
    entries = [(float(number), number, number, 1, 1, "") for number in range(500)]
    queue = IndexedQueue(entries, sorted_by_compute=True)
    assert queue.first(3, 1, 1) == entries[0]
    for entry in entries[:300]:
        queue.replace(entry, (entry[0] + 1000, *entry[1:2], entry[2] + 1000, *entry[3:]))
    assert queue.first(299, 1, 1) is None
    assert queue.first(300, 1, 1) == entries[300]
