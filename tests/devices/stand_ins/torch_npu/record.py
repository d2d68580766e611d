"""What was asked of the stand-ins, in order."""

EVENTS: list[str] = []


def note(event: str) -> None:
    EVENTS.append(event)
