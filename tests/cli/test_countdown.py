from pglease.cli.supervise import REAPING, Countdown


def test_nothing_happens_while_trust_is_renewed():
    countdown = Countdown(grace=5)

    steps = {countdown.look(now, remaining=20, reason=None) for now in range(100)}

    assert steps == {"go on"}
    assert not countdown.lost


def test_term_goes_out_with_the_grace_and_half_a_second_left():
    countdown = Countdown(grace=5)

    assert countdown.look(0, 5.51, None) == "go on"
    assert countdown.until_next(0) < 0.011
    assert countdown.look(0.01, 5.5, None) == "term"
    assert countdown.lost


def test_kill_leaves_half_a_second_of_trust_to_reap():
    countdown = Countdown(grace=5)
    countdown.look(0, 5.5, None)

    assert countdown.look(4.99, 0.51, None) == "go on"
    assert countdown.look(5.0, REAPING, None) == "kill"
    assert countdown.look(5.1, 0.4, None) == "kill"


def test_a_late_renewal_buys_no_more_than_the_grace():
    countdown = Countdown(grace=2)
    countdown.look(0, 2.5, None)

    assert countdown.look(1, 30, None) == "go on"
    assert countdown.look(2, 29, None) == "kill"


def test_a_definite_loss_gives_the_grace():
    for reason in ("taken", "forced", "deleted"):
        countdown = Countdown(grace=2)
        countdown.look(0, 30, None)

        assert countdown.look(1, 0, reason) == "term"
        assert countdown.look(2.9, 0, reason) == "go on"
        assert countdown.look(3, 0, reason) == "kill"


def test_a_definite_loss_near_the_end_of_trust_kills_by_then():
    countdown = Countdown(grace=2)
    countdown.look(0, 3.0, None)

    assert countdown.look(1, 0, "taken") == "term"
    assert countdown.look(2.5, 0, "taken") == "kill"


def test_a_definite_loss_at_the_end_of_trust_kills_at_once():
    countdown = Countdown(grace=0)
    countdown.look(0, 0.6, None)

    assert countdown.look(0.2, 0, "forced") == "kill"


def test_what_may_be_granted_this_instant_is_killed_this_instant():
    for reason in ("session_died", "expired", "unreachable"):
        countdown = Countdown(grace=5)
        countdown.look(0, 60, None)

        assert countdown.look(1, 0, reason) == "kill"


def test_a_supervisor_that_overslept_kills_at_once():
    countdown = Countdown(grace=5)
    countdown.look(0, 60, None)

    assert countdown.look(3600, 0, None) == "kill"


def test_what_is_left_behind_gets_the_grace_but_no_longer_than_trust():
    countdown = Countdown(grace=2)
    countdown.look(0, 60, None)

    assert countdown.end(1) == "term"
    assert countdown.end(2) == "go on"
    assert countdown.end(3) == "kill"
    assert not countdown.lost
