"""One look a tick for all who look, none while nobody does, and news when there are some."""

from __future__ import annotations

import asyncio

from pglease import PGLease
from pglease.aio import AsyncPGLease
from pglease.web.app import _Pages
from pglease.web.lookout import Lookout
from pglease.web.views import overview
from tests.web.conftest import Store

SOON = 60.0


def test_any_number_of_viewers_is_one_look_a_tick(leases, store):
    lookout = Lookout(AsyncPGLease(leases), "", 0.02)

    async def view(ticks: int) -> None:
        number = (await lookout.now()).number
        for _ in range(ticks):
            number = (await lookout.after(number)).number

    async def world() -> int:
        await asyncio.wait_for(asyncio.gather(*(view(5) for _ in range(40))), SOON)
        return lookout._view.number

    looks = asyncio.run(world())

    assert store.asked["list"] == store.asked["queues"] == looks
    assert looks <= 7  # the first, five that each waited for, and one of whoever was a tick ahead
    assert store.asked["history"] == 1


def test_page_after_page_within_a_tick_is_one_look(leases, store):
    lookout = Lookout(AsyncPGLease(leases), "", 3600)

    async def world() -> None:
        await asyncio.gather(*(lookout.now() for _ in range(20)))
        await lookout.now()

    asyncio.run(world())

    assert store.asked["list"] == 1


def test_while_nobody_looks_the_store_is_asked_nothing(leases, store):
    lookout = Lookout(AsyncPGLease(leases), "", 0.001)

    async def world() -> list[int]:
        assert not asyncio.all_tasks() - {asyncio.current_task()}
        waiting = asyncio.create_task(lookout.after((await lookout.now()).number))
        await asyncio.wait_for(waiting, SOON)
        before = store.asked["list"]
        await asyncio.sleep(0.05)
        assert not asyncio.all_tasks() - {asyncio.current_task()}
        return [before, store.asked["list"]]

    before, after = asyncio.run(world())

    assert before == after == 2


def test_a_viewer_who_leaves_in_the_middle_of_a_look_takes_it_from_nobody(leases, store):
    lookout = Lookout(AsyncPGLease(leases), "", 0.02)

    async def world() -> int:
        number = (await lookout.now()).number
        viewers = [asyncio.create_task(lookout.after(number)) for _ in range(5)]
        await asyncio.sleep(0)
        for viewer in viewers[:4]:
            viewer.cancel()
        view = await asyncio.wait_for(viewers[4], SOON)
        return view.number - number

    assert asyncio.run(world()) >= 1


def test_the_history_is_read_when_a_hold_begins_or_ends_and_at_no_renewal(leases, worker, store):
    lookout = Lookout(AsyncPGLease(leases), "", 1e-6)
    asked = []

    async def look() -> None:
        view = await lookout.now()
        if "job" in view.leases:
            await lookout.history(view.leases["job"])
        asked.append(store.asked["history"])

    async def world() -> None:
        await look()
        await asyncio.to_thread(worker.try_acquire, "job")
        await look()
        await asyncio.to_thread(worker.renew, "job")
        await look()
        await asyncio.to_thread(worker.release, "job")
        await look()

    asyncio.run(world())

    assert asked == [1, 3, 3, 5]


def test_a_closed_one_sends_everybody_away(leases):
    lookout = Lookout(AsyncPGLease(leases), "", 3600)

    async def world() -> list[object]:
        number = (await lookout.now()).number
        viewers = [asyncio.create_task(lookout.after(number)) for _ in range(3)]
        await asyncio.sleep(0)
        lookout.close()
        return await asyncio.wait_for(asyncio.gather(*viewers), SOON)

    assert asyncio.run(world()) == [None] * 3


def follow(leases, store, deeds, *, name=None, every=0.01):
    """Read a stream of news: what came after each deed."""
    lookout = Lookout(AsyncPGLease(leases), "", every)
    pages = _Pages(leases, lookout, None, force=False)

    async def world() -> list[str]:
        stream = pages.stream(("all", "", "all") if name is None else ("one", name))
        assert (await anext(stream)).startswith("retry:")
        heard = [await asyncio.wait_for(anext(stream), SOON)]
        for deed in deeds:
            await asyncio.to_thread(deed)
            heard.append(await asyncio.wait_for(anext(stream), SOON))
        lookout.close()
        assert [piece async for piece in stream] == []
        return heard

    return asyncio.run(world())


def test_a_stream_tells_of_a_hand_over_an_outage_and_its_end(leases, worker, store: Store):
    with PGLease(store, owner_id="worker-2") as other:
        heard = follow(
            leases,
            store,
            [
                lambda: worker.try_acquire("job", ttl="10m"),
                lambda: worker.release("job"),
                lambda: other.try_acquire("job", ttl="10m"),
                store.fall_silent,
                store.answer_again,
            ],
        )

    assert [event.count("event: page\n") for event in heard] == [1] * 6
    assert all(line.startswith(("event: ", "data: ")) or not line for event in heard for line in event.split("\n"))
    assert ["worker-1" in event for event in heard[:2]] == [False, True]
    assert "last: worker-1" in heard[2]
    assert "worker-2" in heard[3]
    assert ["does not answer" in event for event in heard[3:]] == [False, True, False]


def test_the_stream_of_one_lease_begins_before_anybody_took_it(leases, worker, store):
    heard = follow(leases, store, [lambda: worker.try_acquire("job", ttl="10m")], name="job")

    assert "knows no lease by this name" in heard[0]
    assert "Fencing token" in heard[1]


def test_what_many_ask_for_is_written_once(leases, worker, store, monkeypatch):
    worker.try_acquire("job")
    drawn = []
    monkeypatch.setattr("pglease.web.views.overview", lambda *asked: drawn.append(asked) or overview(*asked))
    pages = _Pages(leases, Lookout(AsyncPGLease(leases), "", 3600), None, force=False)

    async def first(asked) -> str:
        stream = pages.stream(asked)
        await anext(stream)
        return await anext(stream)

    async def world() -> list[str]:
        same = [first(("all", "", "all")) for _ in range(10)]
        return await asyncio.wait_for(asyncio.gather(*same, first(("all", "nobody", "all"))), SOON)

    heard = asyncio.run(world())

    assert len(drawn) == 2
    assert len(set(heard[:10])) == 1
    assert heard[0] is heard[9]
    assert heard[10] != heard[0]


def test_a_stream_without_news_says_that_it_is_there(leases, worker, store, monkeypatch):
    monkeypatch.setattr("pglease.web.app.SILENCE", 0.02)
    worker.try_acquire("job", ttl="10h")

    heard = follow(leases, store, [lambda: None, lambda: None])

    assert heard[1:] == [": nothing new\n\n"] * 2
