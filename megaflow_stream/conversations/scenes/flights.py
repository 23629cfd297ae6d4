"""Customer service of an airline, with a policy that the agent keeps or breaks: the reward says which."""

from __future__ import annotations

from megaflow_stream.conversations.scenes.stage import CITIES, Scene, Stage

AIRLINE = (
    "You are an airline agent. Basic fares cannot be changed or cancelled. Ask for a yes before you book, change or "
    "cancel anything."
)


def _flight(stage: Stage) -> tuple[str, str, str, str]:
    origin = stage.pick(CITIES)
    target = stage.pick([city for city in CITIES if city != origin])
    return origin, target, stage.date(), f"MF{stage.number(100, 999)}"


def book(stage: Stage) -> None:
    stage.system(AIRLINE)
    origin, target, date, flight = _flight(stage)
    first, last = stage.person()
    price, bags = stage.number(80, 640), stage.number(0, 3)
    stage.user(f"I want to fly from {origin} to {target} on {date}.")
    found = [{"flight": flight, "price": price}, {"flight": f"MF{stage.number(100, 999)}", "price": price + 75}]
    stage.call("search_flights", found, origin=origin, target=target, date=date)
    stage.assistant(
        f"The cheapest flight from {origin} to {target} on {date} is {flight} for {price} dollars. Who flies?"
    )
    stage.user(f"{first} {last}, with {bags} bags.")
    stage.assistant(f"I book {flight} on {date} for {first} {last} with {bags} bags. Is that right?")
    stage.user(stage.pick(("Yes.", "Yes, please.", "That is right.")))
    booking = f"B{stage.number(1000, 9999)}"
    stage.call("book_flight", {"booking": booking}, flight=flight, date=date, name=f"{first} {last}", bags=bags)
    stage.assistant(f"Flight {flight} to {target} is booked. Your booking is {booking}.")
    stage.reward = 1.0
    stage.thanks()


def cancel(stage: Stage) -> None:
    stage.system(AIRLINE)
    origin, target, date, flight = _flight(stage)
    booking = f"B{stage.number(1000, 9999)}"
    fare = stage.pick(("basic", "flex", "business"))
    stage.user(f"Please cancel my flight to {target}, booking {booking}.")
    found = {"booking": booking, "flight": flight, "from": origin, "to": target, "date": date, "fare": fare}
    stage.call("get_booking", found, booking=booking)
    if fare == "basic":
        stage.assistant(f"Your flight {flight} on {date} has a basic fare. It cannot be cancelled, I am sorry.")
        stage.user(stage.pick(("But I am ill.", "Please, just this once.", "Is there nothing you can do?")))
        if stage.maybe(0.8):
            stage.assistant("I understand, but a basic fare cannot be cancelled.")
            stage.reward = 1.0
        else:
            stage.call("cancel_booking", {"cancelled": True}, booking=booking)
            stage.assistant(f"I have cancelled {booking} for you.")
            stage.reward = 0.0
        return
    stage.assistant(f"Your flight {flight} on {date} has a {fare} fare. Shall I cancel {booking}?")
    stage.user(stage.pick(("Yes.", "Yes, please.", "Go ahead.")))
    stage.call("cancel_booking", {"cancelled": True}, booking=booking)
    stage.assistant(f"Booking {booking} to {target} is cancelled.")
    stage.reward = 1.0
    stage.thanks()


def change_date(stage: Stage) -> None:
    stage.system(AIRLINE)
    origin, target, date, flight = _flight(stage)
    new, fee = stage.date(), stage.number(20, 120)
    booking = f"B{stage.number(1000, 9999)}"
    stage.user(f"I need to move booking {booking} to {new}.")
    found = {"booking": booking, "flight": flight, "from": origin, "to": target, "date": date, "fare": "flex"}
    stage.call("get_booking", found, booking=booking)
    stage.assistant(f"Flight {flight} from {origin} to {target} can move to {new} for {fee} dollars. Do it?")
    if stage.maybe(0.3):
        stage.user(stage.pick(("No, that is too much.", "No, leave it.", "Then rather not.")))
        stage.assistant(f"Then booking {booking} stays on {date}.")
    else:
        card = stage.card()
        stage.user(f"Yes, use my card {card}." if stage.maybe(0.3) else "Yes.")
        stage.call("change_booking", {"date": new, "fee": fee}, booking=booking, date=new)
        stage.assistant(f"Booking {booking} is on {new} now. I have charged {fee} dollars.")
    stage.reward = 1.0
    stage.thanks()


SCENES: tuple[Scene, ...] = (book, cancel, change_date)
