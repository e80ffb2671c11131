"""What cannot be done now comes again: nack a message, and see its second attempt.

python examples/retries.py
"""

import pulque

with pulque.connect() as client:
    client.send("card.charged", b"4 euros")

    with client.consumer("card.charged", group="billing") as consumer:
        for message in consumer:
            amount = message.body.decode()
            if message.attempt == 1:
                print(f"attempt 1: the bank does not answer, {amount} not charged")
                message.nack("the bank does not answer")
                continue
            print(f"attempt {message.attempt}: charged {amount}")
            message.ack()
            break
