"""The lab's time server speaks SNTP as RFC 4330 has it."""

import struct

from lab.clock import answer

QUESTION = bytes([4 << 3 | 3]) + bytes(39) + b"origin!!"


def test_a_client_is_told_the_time():
    said = answer(QUESTION, 1_000_000_000.5, 1_000_000_001.25)
    assert said is not None and len(said) == 48
    assert (said[0] >> 6, said[0] >> 3 & 7, said[0] & 7) == (0, 4, 4), "no leap second, its version, a server"
    assert 1 <= said[1] <= 15, "a stratum that clients take"
    assert said[24:32] == b"origin!!", "clients take no answer without what they sent"
    assert struct.unpack("!II", said[32:40]) == (3_208_988_800, 2**31)
    assert struct.unpack("!II", said[40:48]) == (3_208_988_801, 2**30)


def test_whatever_is_no_question_gets_no_answer():
    assert answer(b"", 0, 0) is None
    assert answer(QUESTION[:47], 0, 0) is None
    assert answer(bytes([4 << 3 | 4]) + QUESTION[1:], 0, 0) is None, "two servers would answer each other for ever"
