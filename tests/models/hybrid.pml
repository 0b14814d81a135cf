/* The hybrid: a row with an expiry, and a session whose death frees the name after a handover delay.
 *
 * fast: a holder hears of the death of its session within NOTICE, unless it is cut off; then exclusion is not promised,
 * and -DCUT finds the overlap. -DSTRICT: a holder believes only while its session has answered within SILENCE.
 */

#define TTL 5
#define END 9
#define GRANTS 4
#define NOTICE 1
#define SILENCE 1
#ifndef DELAY
#define DELAY 2
#endif
#define NOBODY 0

byte now = 1;
byte row, row_until;        /* whose it is (client + 1), and until when */
bit tied;                   /* its holder's session has the lock; else the row rests on its expiry alone */
byte lock;                  /* whose session has the advisory lock (client + 1) */
byte free_since[2];         /* since when a candidate's session has had the lock of a row that is not its own */
byte until[2];              /* a client's belief; 0 for none */
byte heard[2];              /* when its session answered last */
byte died_at[2];            /* when the server dropped its session, 0 while it lives */
bit cut[2];                 /* it can neither hear nor be heard */
byte grants;

#define ASKS(c) (grants < GRANTS && !cut[c] && until[c] == 0)
#define HEARD(c) (cut[c] || died_at[c] == 0 || until[c] == 0 || now < died_at[c] + NOTICE)
#ifdef STRICT
#define BELIEVES(c) (now < until[c] && now < heard[c] + SILENCE)
#else
#define BELIEVES(c) (now < until[c])
#endif

inline grant() {
    assert(!BELIEVES(1 - c));
    grants++;
    row = c + 1; row_until = now + TTL; tied = (lock == c + 1);
    until[c] = now + TTL - 1; heard[c] = now;
    free_since[c] = 0
}

inline client() {
    if
    :: ASKS(c) && died_at[c] == 0 && lock == 0 -> lock = c + 1; free_since[c] = now
    :: ASKS(c) && lock == c + 1 && (row == 0 || row_until <= now) -> grant()
#ifdef BUG_LOCK_ALONE
    :: ASKS(c) && lock == c + 1 && row != 0 && row != c + 1 && free_since[c] != 0 && now >= free_since[c] + DELAY ->
#else
    :: ASKS(c) && lock == c + 1 && row != 0 && row != c + 1 && tied && free_since[c] != 0 && now >= free_since[c] + DELAY ->
#endif
        grant()                                                                            /* its holder's session died */
#ifndef BUG_DEMANDS_BOTH
    :: ASKS(c) && lock != c + 1 && row != 0 && row != c + 1 && row_until <= now ->
#ifdef FROZEN
        assert(!(lock == row && died_at[2 - lock] == 0));    /* reached: that is what must be possible */
#endif
        grant()
#endif
    :: !cut[c] && until[c] != 0 && died_at[c] == 0 -> heard[c] = now                       /* a ping is answered */
    :: !cut[c] && BELIEVES(c) && until[c] != 0 && died_at[c] == 0 && row == c + 1 && row_until > now ->
        row_until = now + TTL; until[c] = now + TTL - 1; heard[c] = now                    /* renewed */
    :: until[c] != 0 && !BELIEVES(c) -> until[c] = 0; heard[c] = 0                         /* over, by its own clock */
    :: !cut[c] && died_at[c] != 0 -> until[c] = 0; heard[c] = 0; died_at[c] = 0            /* it hears, and begins anew */
    fi
}

inline trouble() {
    if
#ifndef FROZEN
    :: died_at[c] == 0 -> died_at[c] = now; free_since[c] = 0;
        if :: lock == c + 1 -> lock = 0 :: else fi
#endif
#ifdef CUT
    :: !cut[c] -> cut[c] = 1
    :: cut[c] -> cut[c] = 0
#endif
    :: now < END && HEARD(0) && HEARD(1) -> now++
    fi
}

init {
    byte c;
    do
    :: atomic { c = 0; client(); c = 0 }
    :: atomic { c = 1; client(); c = 0 }
    :: atomic { c = 0; trouble(); c = 0 }
    :: atomic { c = 1; trouble(); c = 0 }
    od
}
