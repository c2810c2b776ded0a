"""The in-process chat harness: one model call per segment, every call through the interception server."""

from typing import Any

import aiohttp
from verifiers.v1 import HarnessConfig, ModelContext, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult, Runtime

CONTEXT_EXHAUSTED = "context_length_exceeded"
"""Error code with which the gateway refuses a prompt that leaves no room for a completion."""


class ChatHarnessConfig(HarnessConfig):
    """No settings of its own."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Sends the conversation, returns; verifiers resumes it with the user's next turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace[Any, Any, Any],
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Run one segment. Tools (`mcp_urls`) are refused by verifiers: this harness declares no support."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system is not None else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        # The harness runs on the host, whatever the runtime: model calls wait for workers, hence no time-out.
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            ) as response,
        ):
            if response.status == 200:
                return ProgramResult(0, "", "")
            text = await response.text()
        if CONTEXT_EXHAUSTED in text and trace.num_turns:
            # The policy used its context up: that ends the episode, and it is scored.
            trace.stop(CONTEXT_EXHAUSTED)
            return ProgramResult(0, "", "")
        return ProgramResult(1, "", f"model call failed with HTTP {response.status}: {text[:500]}")
