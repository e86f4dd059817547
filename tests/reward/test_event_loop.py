"""The event loop of async functions: any thread starts coroutines, forked processes have their own."""

import asyncio
import os
import threading

import pytest

from rft_fn.reward.event_loop import EventLoop


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_has_a_loop_of_its_own():
    """The thread of the parent's is not there, and nobody would run what is started in it."""
    loop = EventLoop()
    assert loop.run(double(1)) == 2
    child = os.fork()
    if not child:
        found = 0
        try:
            found = loop.start(double(3)).result(20)
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert loop.run(double(2)) == 4
    loop.close()


def test_threads_that_begin_together_share_one_loop():
    loop, loops, ready = EventLoop(), [], threading.Barrier(8)

    async def own():
        return asyncio.get_running_loop()

    def work():
        ready.wait(10)
        loops.append(loop.start(own()).result(10))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loops) == 8 and len(set(loops)) == 1
    loop.close()
