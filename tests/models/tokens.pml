/* Tokens: grants, releases, cleanups that delete rows, and failovers to a replica that is behind.
 *
 * Proved within the bounds: whatever is deleted and whatever is lost, each grant's token is above all earlier ones.
 */

#define GRANTS 4
#define FAILOVERS 2
#define ABOVE 8             /* the first token of an epoch: epoch * 8, for the 2^32 of the real ones */

bit row, taken;             /* the row is there; somebody holds it */
byte token, base;           /* the row's token; what new rows start above, epoch included */
bit row_r, taken_r;         /* the same on the replica */
byte token_r, base_r;
bit asking[2];              /* an insert is under way: it has the table's lock and has read the floor */
byte read[2];
byte last, grants, timeline;

#define EPOCH(base) ((base) / ABOVE)

inline granted(it) {
    assert(it > last);
    last = it; grants++;
    row = 1; taken = 1; token = it
}

inline client() {
    if
    :: grants < GRANTS && !row && !asking[c] -> asking[c] = 1; read[c] = base
    :: asking[c] -> asking[c] = 0;
        if
        :: !row && grants < GRANTS -> granted(read[c] + 1)
        :: else                                             /* somebody else was faster */
        fi;
        read[c] = 0
    :: grants < GRANTS && row && !taken ->
        if
        :: token > EPOCH(base) * ABOVE -> granted(token + 1)
        :: else -> granted(EPOCH(base) * ABOVE + 1)
        fi
    :: row && taken -> taken = 0;                            /* released, or lapsed */
#ifdef BUG_DELETE_ON_RELEASE
        row = 0; token = 0
#endif
    fi
}

inline operator() {
    if
#ifdef BUG_NO_LOCK
    :: row && !taken ->
#else
    :: row && !taken && !asking[0] && !asking[1] ->
#endif
#ifndef BUG_NO_FLOOR
        if :: token > base -> base = token :: else fi;
#endif
        row = 0; token = 0
    :: row_r != row || taken_r != taken || token_r != token || base_r != base ->
        row_r = row; taken_r = taken; token_r = token; base_r = base
    :: timeline < FAILOVERS -> timeline++;
        row = row_r; taken = taken_r; token = token_r; base = base_r;
        asking[0] = 0; asking[1] = 0; read[0] = 0; read[1] = 0;
#ifndef BUG_NO_EPOCH
        if
#ifndef BUG_FORGETS_THE_TIMELINE
        :: timeline > EPOCH(base) + 1 -> base = timeline * ABOVE    /* this replica missed an earlier epoch */
#endif
        :: else -> base = (EPOCH(base) + 1) * ABOVE
        fi
#endif
    fi
}

init {
    byte c;
    do
    :: atomic { c = 0; client(); c = 0 }
    :: atomic { c = 1; client(); c = 0 }
    :: atomic { operator() }
    od
}
