"""Functions that are called with messages; this is how most programs consume.

python examples/app.py            (it sends itself some work, and stops when that is done)
cd examples && pulque run app:app (the same, as in production)
"""

from dataclasses import dataclass

import pulque

COUNT = 20

app = pulque.App(name="kitchen")
served: set[int] = set()


@dataclass
class Cake:
    number: int
    slices: int = 8


@app.on_startup
async def order_cakes() -> None:
    for number in range(COUNT):
        await app.send("cake.ordered", Cake(number))


@app.subscribe("cake.ordered", group="bakery", concurrency=4, timeout=30)
async def bake(cake: Cake, message: pulque.ReceivedMessage) -> None:
    if cake.number == 7 and message.attempt == 1:
        raise pulque.Retry("the oven is cold", delay=0)
    served.add(cake.number)
    if len(served) == COUNT:
        print(f"served {COUNT} cakes, number 7 at the second attempt")
        app.stop()


if __name__ == "__main__":
    app.run()
