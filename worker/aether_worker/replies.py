"""Replies: published until the server confirms that it stored them.

A reply that is refused (a full stream) or unanswered (no connection) is held and tried again, for
ever, and only while connected; its job stays held and is acknowledged afterwards.
"""

import nats.errors
from aether_common.bus import Bus
from aether_common.confirm import Confirmed
from aether_common.names import Names
from aether_common.wire import Reason, Reply, ReplyKind
from loguru import logger
from nats.js.errors import APIError

from aether_worker.artifacts import backoff

CONFIRM_S = 5.0
TOO_LARGE = 10054
"""JetStream's error code for a message above `max_msg_size`: trying again cannot help."""


class Replies:
    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus = bus
        self._confirmed = Confirmed(bus, CONFIRM_S)
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
            await self._confirmed.publish(subject, payload)
        except APIError as error:
            return str(error.description or error), error.err_code == TOO_LARGE
        except nats.errors.Error as error:
            return str(error) or type(error).__name__, False
        return None


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
