"""The thread that runs the model, held by others in turns."""

import threading

import pytest

from llmcache.serving.model_thread import ModelThread


def test_who_holds_it_lets_others_have_turns() -> None:
    thread, order = ModelThread(), []
    with thread.held() as turn:
        waiting = [thread.submit(lambda n=n: order.append(n)) for n in range(2)]  # type: ignore[misc]
        order.append("held")
        turn()
        assert all(one.done() for one in waiting)
        thread.submit(lambda: order.append("last"))
        order.append("held")
    thread.close()
    assert order == ["held", 0, 1, "held", "last"]


def test_two_hold_it_in_turns() -> None:
    thread, order = ModelThread(), []

    def hold(name: str) -> None:
        with thread.held() as turn:
            for _ in range(3):
                order.append(name)
                turn()

    gate = threading.Event()
    thread.submit(gate.wait)
    holders = [threading.Thread(target=hold, args=(name,)) for name in "ab"]
    for holder in holders:
        holder.start()
    while len(thread) < len(holders):
        gate.wait(0.001)
    gate.set()
    for holder in holders:
        holder.join()
    thread.close()
    assert sorted(order) == list("aaabbb") and order[0] != order[1] and order[2] != order[3]


def test_a_failure_lets_go_of_it_and_once_closed_it_cannot_be_held() -> None:
    thread = ModelThread()
    with pytest.raises(KeyError), thread.held():
        raise KeyError
    assert thread.submit(lambda: 1).result(5) == 1
    thread.close()
    with pytest.raises(RuntimeError, match="closed"), thread.held():
        pass
