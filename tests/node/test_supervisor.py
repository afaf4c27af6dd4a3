"""What a node cannot live without."""

from __future__ import annotations

import threading

from server.node.supervisor import Supervisor


def test_the_first_death_is_the_reason_and_an_orderly_end_is_none() -> None:
    supervisor, threads = Supervisor(), [threading.Thread(target=print, name=name) for name in ("first", "second")]
    supervisor.watch(lambda: threads)
    for thread in threads:
        thread.start()
        thread.join()
    assert supervisor.look() == "the thread 'first' has ended"
    assert supervisor.look() == "the thread 'first' has ended"
    orderly = Supervisor()
    orderly.watch(lambda: threads)
    orderly.end()
    assert orderly.look() == ""
