"""The numbers of what can be asked."""

from enum import IntEnum

__all__ = ["Opcode"]


class Opcode(IntEnum):
    """What a frame asks; its answer has the same opcode with the high bit set."""

    HELLO = 1
    ROUTE = 2
    SEND = 3
    PULL = 4
    SETTLE = 5
    HEARTBEAT = 6
    READ = 7
    POSITIONS = 8
    SUBSCRIBE = 9
    REGISTER = 10
    WATCH = 11
    ADOPT = 12
    ATTEND = 13
    LOCK = 14
    UNLOCK = 15
    LEAD = 16
    CHANGE_IN_SYNC = 17
    FOLLOW = 18
    REPLICATE = 19
    COPY_CHECKPOINT = 20
    HAND_OVER = 21
    STATUS = 32
    SEAL = 33
    RESET = 34
    GROUPS = 35
    DEAD = 36
    RESEND = 37
    CHANGE_GROUP = 40
    CLIENTS = 41
    SKIP = 42
    ORDERED = 43
    CLOSE = 44
    SUBSCRIPTIONS = 45
    CANCEL = 50
    RESCHEDULE = 51
    SCHEDULED = 52
    STUCK = 53
    FIND = 54
