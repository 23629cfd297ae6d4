"""An assistant with small tools: weather, search, calendar, calculations, units."""

from __future__ import annotations

from megaflow_stream.conversations.scenes.stage import CITIES, Scene, Stage, phrases

HELPER = "You are a helpful assistant. Use your tools for facts and numbers."
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy")
TOPICS = {
    "the tallest mountain": ("Mount Everest", "8849 metres high"),
    "the longest river": ("the Nile", "6650 kilometres long"),
    "the largest ocean": ("the Pacific", "165 million square kilometres wide"),
    "the deepest lake": ("Lake Baikal", "1642 metres deep"),
    "the largest desert": ("the Antarctic", "14 million square kilometres wide"),
    "the fastest land animal": ("the cheetah", "110 kilometres an hour fast"),
    "the smallest planet": ("Mercury", "4879 kilometres wide"),
    "the hottest planet": ("Venus", "465 degrees hot"),
}
UNITS = (("kilometres", "miles", 0.6214), ("kilograms", "pounds", 2.2046), ("litres", "gallons", 0.2642))
EVENTS = phrases("dentist,team meeting,piano lesson,lunch with Ada,parents' evening,gym,haircut,project review")


def weather(stage: Stage) -> None:
    stage.system(HELPER)
    stage.offer("get_weather", "The weather of a place", "city", "date")
    for turn in range(stage.number(1, 3)):
        city, date = stage.pick(CITIES), stage.date()
        asked = ("What is the weather in {0} on {1}?", "Will it rain in {0} on {1}?", "How warm is {0} on {1}?")
        stage.user(stage.pick(asked).format(city, date) if turn == 0 else f"And in {city} on {date}?")
        sky, warm = stage.pick(SKIES), stage.number(-8, 36)
        stage.call("get_weather", {"city": city, "sky": sky, "celsius": warm}, city=city, date=date)
        advice = "Take an umbrella." if sky == "rainy" else "Dress warmly." if warm < 5 else "Enjoy the day."
        stage.assistant(f"In {city} it is {sky} on {date} with {warm} degrees. {advice}")


def calculate(stage: Stage) -> None:
    stage.system(HELPER)
    stage.offer("calculate", "Evaluates an expression", "expression")
    for turn in range(stage.number(1, 3)):
        left, right = stage.number(12, 990), stage.number(3, 99)
        sign, word = stage.pick((("+", "plus"), ("-", "minus"), ("*", "times")))
        asked = f"What is {left} {word} {right}?" if turn == 0 else f"And {left} {word} {right}?"
        stage.user(asked)
        result = {"+": left + right, "-": left - right, "*": left * right}[sign]
        stage.call("calculate", {"result": result}, expression=f"{left} {sign} {right}")
        stage.assistant(f"{left} {word} {right} is {result}.")


def convert(stage: Stage) -> None:
    stage.system(HELPER)
    stage.offer("calculate", "Evaluates an expression", "expression")
    source, target, factor = stage.pick(UNITS)
    amount = stage.number(2, 800)
    stage.user(stage.pick((f"How many {target} are {amount} {source}?", f"Convert {amount} {source} to {target}.")))
    result = round(amount * factor, 1)
    stage.call("calculate", {"result": result}, expression=f"{amount} * {factor}")
    stage.assistant(f"{amount} {source} are {result} {target}.")
    if stage.maybe(0.5):
        stage.thanks()


def search(stage: Stage) -> None:
    stage.system(HELPER)
    stage.offer("search", "Searches the web", "query")
    first = stage.pick(list(TOPICS))
    name, size = TOPICS[first]
    asked = ("What is {}?", "Do you know {}?", "Please look up {}.", "Tell me about {}.")
    stage.user(stage.pick(asked).format(first))
    page = f"https://{stage.pick(('facts', 'atlas', 'wiki', 'science'))}.example.org/{stage.number(100, 9999)}"
    stage.call("search", [{"url": page, "text": f"{name} is {size}."}], query=first)
    stage.assistant(f"{name[0].upper()}{name[1:]} is {first}. It is {size} ({page}).")
    if stage.maybe(0.5):
        second = stage.pick([topic for topic in TOPICS if topic != first])
        name, size = TOPICS[second]
        stage.user(f"And {second}?")
        stage.call("search", [{"url": page, "text": f"{name} is {size}."}], query=second)
        stage.assistant(f"{name[0].upper()}{name[1:]} is {second}. It is {size} ({page}).")


def calendar(stage: Stage) -> None:
    stage.system(HELPER)
    stage.offer("list_events", "The events of a day", "date")
    stage.offer("add_event", "Adds an event", "date", "time", "title")
    event, date, time = (
        stage.pick(EVENTS),
        stage.date(),
        f"{stage.number(8, 19)}:{stage.pick(('00', '15', '30', '45'))}",
    )
    stage.user(stage.pick((f"Put {event} at {time} on {date} into my calendar.", f"Add {event}, {date} at {time}.")))
    busy = stage.maybe(0.35)
    other = stage.pick([e for e in EVENTS if e != event])
    stage.call("list_events", [{"time": time, "title": other}] if busy else [], date=date)
    if busy:
        stage.assistant(f"At {time} on {date} you have {other}. Shall I add {event} all the same?")
        if stage.maybe(0.5):
            stage.user("No.")
            stage.assistant(f"Then I leave {date} as it is.")
            return
        stage.user("Yes.")
    stage.call("add_event", {"ok": True}, date=date, time=time, title=event)
    stage.assistant(f"I have added {event} on {date} at {time}.")
    if stage.maybe(0.4):
        stage.thanks()


SCENES: tuple[Scene, ...] = (weather, calculate, convert, search, calendar)
