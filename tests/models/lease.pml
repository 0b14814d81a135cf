/* The lease: acquire, renew and release over a network that loses and delays, and a server whose clock may be stepped
 * forward by as much as the margin. Time stands still as long as it likes between two ticks, so every delay is tried.
 *
 * Proved within the bounds: nobody is granted the name while another still believes in it; a belief that is over stays
 * over; a renewal and a release act on their own hold only.
 */

#ifndef TTL
#define TTL 3
#endif
#ifndef END
#define END 8      /* ticks */
#endif
#ifndef GRANTS
#define GRANTS 4   /* acquisitions in all */
#endif
#ifdef BUG_NO_MARGIN
#define MARGIN 0
#else
#define MARGIN 1
#endif
#define NOBODY 0

mtype = { nothing, acquire, renew, granted, held, gone };

byte now = 1;               /* real time, and every client's clock */
bit ahead;                  /* the server's clock has been stepped forward by one tick */
byte row_id, row_until;     /* the server's only row */
byte ids;

mtype way[2] = nothing;     /* a client's request or answer on its way */
byte way_id[2], way_sent[2];
byte leaving[2];            /* a client's release on its way: it travels apart and may be overtaken */

byte mine[2];               /* the id of the hold that a client believes it has */
byte until[2];              /* when that belief ends */
byte was[2];                /* the id of its last hold whose time was over */

#define SERVER (now + ahead)
#define BELIEVES(c) (mine[c] != NOBODY && now < until[c])

inline send(what, id, at) { way[c] = what; way_id[c] = id; way_sent[c] = at }
inline drop() { way[c] = nothing; way_id[c] = 0; way_sent[c] = 0 }
inline answer(what) { if :: way[c] = what :: drop() fi }         /* or it is lost */
inline forget() { mine[c] = NOBODY; until[c] = 0 }
#ifdef BUG_REPLY_ANCHOR
#define TRUSTED (now + TTL - MARGIN)
#else
#define TRUSTED (way_sent[c] + TTL - MARGIN)
#endif

inline client() {
    if
    :: way[c] == nothing && mine[c] == NOBODY && ids < GRANTS -> ids++; send(acquire, ids, now)
    :: way[c] == nothing && BELIEVES(c) -> send(renew, mine[c], now)
    :: way[c] == granted ->
        if
        :: mine[c] == NOBODY && now < TRUSTED -> mine[c] = way_id[c]; until[c] = TRUSTED; drop()
        :: else -> drop()
        fi;
        assert(!(BELIEVES(0) && BELIEVES(1)))
    :: way[c] == held ->
        if
#ifdef BUG_REVIVE
        :: mine[c] == way_id[c] && now < TRUSTED -> assert(was[c] != mine[c]); until[c] = TRUSTED
#else
        :: BELIEVES(c) && mine[c] == way_id[c] && TRUSTED > until[c] -> until[c] = TRUSTED
#endif
        :: else
        fi;
        drop();
        assert(!(BELIEVES(0) && BELIEVES(1)))
    :: way[c] == gone -> if :: mine[c] == way_id[c] -> forget() :: else fi; drop()
    :: mine[c] != NOBODY && leaving[c] == NOBODY ->              /* released, or given back after a loss */
        leaving[c] = mine[c];
#ifndef BUG_STORE_FIRST
        forget()
#endif
    :: mine[c] != NOBODY && leaving[c] != NOBODY -> forget()
    fi
}

inline server() {
    if
    :: way[c] == acquire ->
        if
        :: row_id == NOBODY || row_until <= SERVER ->
            row_id = way_id[c]; row_until = SERVER + TTL;
            assert(!BELIEVES(1 - c));
            answer(granted)
        :: else -> answer(gone)
        fi
    :: way[c] == renew ->
        if
#ifdef BUG_RENEW_BY_NAME
        :: row_id != NOBODY && row_until > SERVER ->
#else
        :: row_id == way_id[c] && row_until > SERVER ->
#endif
            assert(row_id == way_id[c]);
            row_until = SERVER + TTL;
            answer(held)
        :: else -> answer(gone)
        fi
    :: leaving[c] != NOBODY ->
        if
#ifdef BUG_RELEASE_BY_NAME
        :: row_id != NOBODY && row_until > SERVER ->
#else
        :: row_id == leaving[c] ->
#endif
            row_id = NOBODY; row_until = 0
        :: else
        fi;
        leaving[c] = NOBODY
    fi
}

inline trouble() {
    if
    :: way[c] != nothing -> drop()
    :: leaving[c] != NOBODY -> leaving[c] = NOBODY
    :: !ahead -> ahead = 1
    :: now < END -> now++;
        if :: mine[0] != NOBODY && now >= until[0] -> was[0] = mine[0] :: else fi;
        if :: mine[1] != NOBODY && now >= until[1] -> was[1] = mine[1] :: else fi
    fi
}

init {
    byte c;
    do
    :: atomic { c = 0; client(); c = 0 }
    :: atomic { c = 1; client(); c = 0 }
    :: atomic { c = 0; server(); c = 0 }
    :: atomic { c = 1; server(); c = 0 }
    :: atomic { c = 0; trouble(); c = 0 }
    :: atomic { c = 1; trouble(); c = 0 }
    od
}
