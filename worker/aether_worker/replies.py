"""Replies: published until the server confirms that it stored them.

A reply that is refused (a full stream) or unanswered (no connection) is held and tried again, for
ever, and only while connected; its job stays held and is acknowledged afterwards.
"""

import json

from aether_common.bus import Bus
from aether_common.errors import BusError
from aether_common.names import Names
from aether_common.wire import Reason, Reply, ReplyKind
from loguru import logger

from aether_worker.artifacts import backoff

CONFIRM_S = 5.0
TOO_LARGE = 10054
"""JetStream's error code for a message above `max_msg_size`: trying again cannot help."""


class Replies:
    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus = bus
        self._names = names

    async def publish(self, reply: Reply) -> None:
        """Returns when the reply is stored in the replies' stream."""
        subject = self._names.reply(reply.worker, reply.job)
        attempt = 0
        while True:
            payload = reply.encode()
            problem = await self._try(subject, payload)
            if problem is None:
                return
            message, permanent = problem
            if permanent and reply.kind is not ReplyKind.ERROR:
                reply = too_large(reply, len(payload))
                continue
            attempt += 1
            if attempt in (1, 10) or attempt % 100 == 0:
                logger.bind(job=reply.job).warning("reply held, it was not stored {} times: {}", attempt, message)
            await backoff(attempt)

    async def _try(self, subject: str, payload: bytes) -> tuple[str, bool] | None:
        """None when stored, else the problem and whether it is permanent."""
        await self._bus.connected.wait()
        if len(payload) > self._bus.client.max_payload:
            return "larger than the server's max_payload", True
        try:
            answer = json.loads((await self._bus.request(subject, payload, CONFIRM_S)).data)
        except BusError as error:
            return str(error), False
        except ValueError as error:
            return f"not a confirmation: {error}", False
        if error := answer.get("error"):
            return str(error.get("description", error)), error.get("err_code") == TOO_LARGE
        return None if "seq" in answer else (f"not a confirmation: {answer}", False)


def too_large(reply: Reply, size: int) -> Reply:
    """What is sent instead of a reply that no server takes."""
    return reply.model_copy(
        update={
            "kind": ReplyKind.ERROR,
            "reason": Reason.ENGINE,
            "message": f"the reply has {size} bytes, more than the server takes: lower max_tokens",
            "tokens": b"",
            "logprobs": b"",
            "finish_reason": None,
        }
    )
