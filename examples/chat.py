"""A chat in the terminal: python examples/chat.py. Ctrl-C stops an answer, Ctrl-D leaves."""

from __future__ import annotations

from service.client import Client, ConnectionLost
from service.protocol import Delta, Done, Message, ServiceError


def main() -> None:
    messages: list[Message] = []
    with Client() as client:
        print(f"{client.health().model}, at your service.")
        while True:
            try:
                messages.append(Message("user", input("\n> ")))
            except EOFError:
                return
            answer = client.chat(messages)
            said = ""
            events = iter(answer)
            while True:
                try:
                    event = next(events)
                except KeyboardInterrupt:
                    answer.interrupt()
                    continue
                if isinstance(event, Delta):
                    said += event.text
                    print(event.text, end="", flush=True)
                elif isinstance(event, Done):
                    print(f"\n[{event.reason}, {event.timing.tokens_per_s:.0f} tokens/s]")
                    break
            messages.append(Message("assistant", said))


if __name__ == "__main__":
    try:
        main()
    except (ServiceError, ConnectionLost) as error:
        raise SystemExit(str(error)) from None
