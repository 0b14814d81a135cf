"""An endpoint that runs once at a time for each tenant, in however many servers.

    DATABASE_URL=postgresql://me@db/app uvicorn --app-dir examples --port 8000 fastapi_sync:app

Ask twice at once (`curl -i -X POST localhost:8000/sync/acme`): the second is answered 423, and when to come again.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI

from pglease import AsyncHeldLease
from pglease.contrib.fastapi import lease, lifespan


@asynccontextmanager
async def own(app: FastAPI) -> AsyncIterator[None]:
    """Warm up, on one server at a time: the application's own lifespan, inside pglease's."""
    async with app.state.pglease.acquire("warm-up", ttl="1m", wait="1m"):
        await asyncio.sleep(0)
    yield


app = FastAPI(lifespan=lifespan(os.environ.get("DATABASE_URL"), inner=own))
OneSync = Annotated[AsyncHeldLease, Depends(lease("sync:{tenant}", ttl="1m"), scope="function")]


@app.post("/sync/{tenant}")
async def sync(tenant: str, held: OneSync, seconds: float = 3) -> dict[str, str | int]:
    await held.lost.wait(seconds)  # stands for work that ends at once when the lease is lost
    return {"synchronised": tenant, "under": held.fencing_token}
