from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.schedule.indexed_queue import IndexedQueue

AMOUNTS = st.integers(0, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), AMOUNTS, AMOUNTS, AMOUNTS, AMOUNTS),
        st.tuples(st.just("extend"), st.integers(1, 400), AMOUNTS, AMOUNTS),
        st.tuples(st.sampled_from(("remove", "replace")), st.integers(0, 500)),
        st.tuples(st.just("remove some"), st.integers(1, 400)),
        st.tuples(st.just("look"), AMOUNTS, AMOUNTS, AMOUNTS),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None, database=None)
@given(STEPS)
def test_first_agrees_with_a_linear_search(steps):
    queue, entries, number = IndexedQueue(), [], 0
    for step, *values in steps:
        new = []
        if step == "add":
            new = [(float(values[0]), number, *values[1:], "")]
            queue.add(new[0])
        elif step == "extend":
            new = [(float(i * 7 % 11), number + i, values[1], i % 7, values[2], "") for i in range(values[0])]
            queue.extend(new)
        elif step == "remove some":
            for entry in entries[: values[0]]:
                queue.remove(entry)
            del entries[: values[0]]
        elif step in ("remove", "replace") and entries:
            gone = entries.pop(values[0] % len(entries))
            if step == "remove":
                queue.remove(gone)
            else:
                new = [(gone[0] + 1.0, number, *gone[2:])]
                queue.replace(gone, new[0])
        elif step == "look":
            compute, memory, cores = values
            fitting = (e for e in entries if e[2] <= compute and e[3] <= memory and e[4] <= cores)
            assert queue.first(compute, memory, cores) == next(fitting, None)
        number += len(new)
        entries = sorted(entries + new)
    for limits in [(amount, amount, amount) for amount in range(7)]:
        expected = next((e for e in entries if all(e[2 + i] <= limits[i] for i in range(3))), None)
        assert queue.first(*limits) == expected


def test_with_sorted_compute_the_first_excess_ends_the_search():
    entries = [(float(number), number, number, 1, 1, "") for number in range(500)]
    queue = IndexedQueue(entries, sorted_by_compute=True)
    assert queue.first(3, 1, 1) == entries[0]
    for entry in entries[:300]:
        queue.remove(entry)
    assert queue.first(299, 1, 1) is None
    assert queue.first(300, 1, 1) == entries[300]


def test_a_removed_first_entry_can_be_added_with_another_item():
    entries = [(float(number), number, 1, 1, 1, object()) for number in range(500)]
    queue = IndexedQueue(entries)
    for gone in entries:
        back = (*gone[:5], object())
        queue.remove(gone)
        queue.add(back)
        assert queue.first(1, 1, 1) is back
        queue.remove(back)
