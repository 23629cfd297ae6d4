"""Customer service of a shop and a clinic: orders, refunds, accounts, appointments."""

from __future__ import annotations

from megaflow_stream.conversations.scenes.stage import CITIES, Scene, Stage, phrases

SHOP = "You are the support agent of a web shop. Look up orders before you answer. Refunds within 30 days only."
CLINIC = "You are the front desk of a clinic. Book only free slots and confirm the date."
GOODS = phrases(
    "desk lamp,rain jacket,coffee grinder,mountain bike,headphones,water bottle,keyboard,hiking "
    "boots,tea pot,office chair,backpack,phone case,bread knife,yoga mat,camera strap"
)
CARRIERS = ("Northline", "ParcelBird", "Swift Post")
DOCTORS = ("Dr. Adler", "Dr. Banks", "Dr. Chen", "Dr. Diaz", "Dr. Evans")


def _order(stage: Stage) -> tuple[str, str, int]:
    return f"W{stage.number(1000000, 9999999)}", stage.pick(GOODS), stage.number(9, 240)


def _greeting(stage: Stage, text: str) -> None:
    stage.user(stage.pick(("Hi, ", "Hello, ", "Good morning, ", "")) + text)


def order_status(stage: Stage) -> None:
    stage.system(SHOP)
    stage.offer("get_order", "Looks up an order", "order_id")
    order, item, price = _order(stage)
    asked = stage.pick(("where is my order?", "my parcel has not come yet.", "I want to know when my order arrives."))
    if stage.maybe(0.5):
        _greeting(stage, asked)
        stage.assistant("I can check that. What is your order number?")
        stage.user(stage.pick((f"It is {order}.", f"{order}", f"The number is {order}.")))
    else:
        _greeting(stage, f"{asked} The number is {order}.")
    carrier, city, date = stage.pick(CARRIERS), stage.pick(CITIES), stage.date()
    state = stage.pick(("shipped", "delayed", "packed"))
    found = {"order_id": order, "item": item, "price": price, "state": state, "carrier": carrier, "city": city}
    stage.call("get_order", found | {"arrives": date}, order_id=order)
    stage.assistant(
        {
            "shipped": f"Your {item} was shipped with {carrier} and is in {city} now. It arrives on {date}.",
            "delayed": f"I am sorry: your {item} is delayed in {city}. {carrier} now plans to deliver it on {date}.",
            "packed": f"Your {item} is packed and waits for {carrier} in {city}. It arrives on {date}.",
        }[state]
    )
    if stage.maybe(0.4):
        phone = stage.phone()
        stage.user(f"Please let the driver call me at {phone}.")
        stage.assistant(f"I have noted that {carrier} calls you before the delivery on {date}.")
    stage.thanks()


def refund(stage: Stage) -> None:
    stage.system(SHOP)
    stage.offer("get_order", "Looks up an order", "order_id")
    stage.offer("create_refund", "Pays an order back", "order_id", "amount")
    order, item, price = _order(stage)
    fault = stage.pick(("is broken", "has the wrong colour", "is too small", "does not work", "came twice"))
    _greeting(stage, f"the {item} I bought {fault}. I want my money back. Order {order}.")
    days = stage.number(2, 60)
    card = stage.card()
    stage.call("get_order", {"order_id": order, "item": item, "price": price, "days": days}, order_id=order)
    if days > 30:
        stage.assistant(
            f"I am sorry that the {item} {fault}. It was bought {days} days ago, and we refund within 30 days only."
        )
        if stage.maybe(0.5):
            stage.user(stage.pick(("That is a pity.", "Can you make an exception?", "I did not know that.")))
            stage.assistant("I understand, but I cannot refund it. You may send it to us for repair.")
        return
    stage.assistant(f"I am sorry that the {item} {fault}. I can refund {price} dollars. Shall I do it?")
    if stage.maybe(0.5):
        stage.user(f"Yes, please. My card is {card}.")
    else:
        stage.user("Yes, please.")
    refund_id = f"R{stage.number(10000, 99999)}"
    stage.call("create_refund", {"refund_id": refund_id, "amount": price}, order_id=order, amount=price)
    stage.assistant(f"Done: {price} dollars for the {item} are on their way. The refund number is {refund_id}.")
    stage.thanks()


def change_account(stage: Stage) -> None:
    stage.system(SHOP)
    stage.offer("find_user", "Finds a customer", "email")
    stage.offer("update_user", "Changes a customer's data", "user_id", "field", "value")
    first, last = stage.person()
    old = stage.email(first, last)
    user_id = f"{first}_{last}_{stage.number(1000, 9999)}".lower()
    field = stage.pick(("email", "phone", "city"))
    _greeting(stage, f"I am {first} {last} and I want to change my {field}.")
    stage.assistant("Of course. Which e-mail address do we have of you?")
    stage.user(f"It is {old}.")
    stage.call("find_user", {"user_id": user_id, "name": f"{first} {last}"}, email=old)
    stage.assistant(f"Thank you, {first}. What is the new {field}?")
    value = {"email": stage.email(first, last), "phone": stage.phone(), "city": stage.pick(CITIES)}[field]
    stage.user(value if stage.maybe(0.5) else f"{value}, please.")
    stage.call("update_user", {"ok": True}, user_id=user_id, field=field, value=value)
    stage.assistant(f"Your {field} is {value} now, {first}.")
    stage.thanks()


def appointment(stage: Stage) -> None:
    stage.system(CLINIC)
    stage.offer("free_slots", "Lists the free times of a doctor", "doctor", "date")
    stage.offer("book_slot", "Books a time", "doctor", "date", "time", "name")
    doctor, date = stage.pick(DOCTORS), stage.date()
    first, last = stage.person()
    _greeting(stage, f"I need an appointment with {doctor} on {date}. My name is {first} {last}.")
    start = stage.number(8, 11)
    slots = [f"{start}:00", f"{start + 1}:30", f"{start + 4}:15"]
    stage.call("free_slots", {"doctor": doctor, "date": date, "slots": slots}, doctor=doctor, date=date)
    stage.assistant(f"{doctor} is free on {date} at {slots[0]}, {slots[1]} and {slots[2]}. Which time suits you?")
    time = stage.pick(slots)
    stage.user(stage.pick((f"{time}, please.", f"I take {time}.", f"At {time}.")))
    stage.call("book_slot", {"booked": True}, doctor=doctor, date=date, time=time, name=f"{first} {last}")
    stage.assistant(f"Your appointment with {doctor} is booked for {date} at {time}, {first}.")
    if stage.maybe(0.3):
        email = stage.email(first, last)
        stage.user(f"Can you send that to {email}?")
        stage.assistant(f"Yes, I send a note about {date} at {time} to {email}.")
    stage.thanks()


SCENES: tuple[Scene, ...] = (order_status, refund, change_account, appointment)
