"""The lease table of pglease.

Copy this file into your versions directory and set `down_revision`. Running it where the table exists already is
harmless; a table of pglease 0.0.x is upgraded in place. Autogenerate writes `drop_table` for tables it has no model of:
leave ours out with `include_name` in env.py.
"""

from alembic import op

revision = "pglease_0001"
down_revision = None
branch_labels = None
depends_on = None

FORWARD = r"""
-- pglease, layout 1: the lease table, and beside it one row with the version mark and the token floor, the tickets of
-- those who queue, and what is remembered of holds that have ended.
--
-- Safe to run again, and beside any number of others that run it. It makes what is missing, upgrades a table of
-- pglease 0.0.x in place, and refuses a table that is not ours. It also refuses a 0.0.x table with a lease that still
-- runs: such clients write by their own clock and delete rows. Stop them, or accept that:  SET pglease.force = 'on';
DO $pglease$
DECLARE
    as_published CONSTANT text[] := ARRAY[
        'task_name text', 'task_name character varying', 'owner_id text', 'owner_id character varying',
        'acquired_at timestamp with time zone', 'expires_at timestamp with time zone',
        'heartbeat_at timestamp with time zone'];
    is_new boolean := false;
    is_published boolean := false;
    live bigint := 0;
    old_floor bigint;
    new_floor bigint;
    present_lineage text;
BEGIN
    -- One at a time: IF NOT EXISTS is check-then-create, and of two that start at once one would fail.
    PERFORM pg_catalog.pg_advisory_xact_lock(5784230157903120741);

    IF pg_catalog.to_regclass('"pglease_leases"') IS NULL THEN
        is_new := true;
        -- The second key makes a takeover a change of a key and a heartbeat not one: so a guard's FOR KEY SHARE lets
        -- heartbeats through and keeps takeovers out. No index on what changes during a hold, and room on each page:
        -- heartbeats and marks stay HOT. Vacuum often, since the table is small and busy, and never truncate it, since
        -- that stops every renewal meanwhile.
        CREATE TABLE "pglease_leases" (
            task_name       text COLLATE "C" NOT NULL PRIMARY KEY,
            owner_id        text NOT NULL,
            acquired_at     timestamptz NOT NULL,
            expires_at      timestamptz NOT NULL,
            heartbeat_at    timestamptz NOT NULL,
            lease_id        uuid,
            fencing_token   bigint NOT NULL,
            transitions     bigint NOT NULL DEFAULT 0,
            metadata        jsonb,
            waited_until    timestamptz,  -- somebody waits for this name, or watches it, until then
            queued_until    timestamptz,  -- somebody stands in its queue until then
            slot            timestamptz,  -- the period of the last hold that was taken once per period
            session_pid     integer,      -- the holder's session, when its death is to free the name
            session_started timestamptz,
            CONSTRAINT "pglease_leases_token_key" UNIQUE (task_name, fencing_token)
        ) WITH (fillfactor = 50,
            autovacuum_vacuum_scale_factor = 0,
            autovacuum_vacuum_threshold = 1000,
            autovacuum_analyze_threshold = 1000,
            vacuum_truncate = off);
        COMMENT ON TABLE "pglease_leases" IS 'pglease: one row a lease; lease_id is null when nobody holds it';
    ELSE
        -- Five columns are what 0.0.x published, and what we keep.
        IF (SELECT c.relkind <> 'r' OR (
                SELECT count(*) FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                  AND a.attname || ' ' || pg_catalog.format_type(a.atttypid, NULL) = ANY (as_published)) <> 5
            FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass('"pglease_leases"')) THEN
            RAISE EXCEPTION USING ERRCODE = '55000',
                MESSAGE = 'the table pglease_leases is not a lease table; nothing was changed',
                HINT = 'choose another table_name or schema';
        END IF;
        is_published := NOT EXISTS (
            SELECT 1 FROM pg_catalog.pg_attribute a
            WHERE a.attrelid = pg_catalog.to_regclass('"pglease_leases"') AND a.attname = 'fencing_token'
              AND NOT a.attisdropped);
    END IF;

    IF is_published THEN
        -- Locked before looking, or a 0.0.x client could slip in between.
        LOCK TABLE "pglease_leases" IN ACCESS EXCLUSIVE MODE;
        SELECT count(*) INTO live FROM "pglease_leases" WHERE expires_at > pg_catalog.clock_timestamp();
        IF live > 0 AND pg_catalog.current_setting('pglease.force', true) IS DISTINCT FROM 'on' THEN
            RAISE EXCEPTION USING ERRCODE = '55000',
                MESSAGE = 'the 0.0.x table pglease_leases has ' || live || ' running lease(s); nothing was changed',
                HINT = 'stop the 0.0.x clients, or run "pglease schema apply --force"';
        END IF;
    END IF;

    IF pg_catalog.to_regclass('"pglease_leases_meta"') IS NULL THEN
        CREATE TABLE "pglease_leases_meta" (
            one         boolean PRIMARY KEY DEFAULT true CHECK (one),
            version     integer NOT NULL,
            protocol    integer NOT NULL,
            token_floor bigint NOT NULL DEFAULT 0,  -- its upper half is the epoch
            lineage     text,  -- the server that granted last; on another one a new epoch begins
            quarantined_until timestamptz  -- nothing is granted before that, since a new epoch began
        );
        COMMENT ON TABLE "pglease_leases_meta" IS 'pglease: version mark, and the token that new names start above';
    ELSIF (SELECT count(*) FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = pg_catalog.to_regclass('"pglease_leases_meta"') AND NOT a.attisdropped
             AND a.attname IN ('one', 'version', 'protocol', 'token_floor', 'lineage', 'quarantined_until')) <> 6 THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = 'the table pglease_leases_meta is not ours; nothing was changed',
            HINT = 'choose another table_name or schema';
    END IF;
    IF pg_catalog.to_regclass('"pglease_leases_tickets"') IS NULL THEN
        CREATE TABLE "pglease_leases_tickets" (
            task_name  text COLLATE "C" NOT NULL,
            ticket_id  uuid NOT NULL,
            owner_id   text NOT NULL,
            number     bigint NOT NULL,
            expires_at timestamptz NOT NULL,  -- it counts as long as it is renewed
            CONSTRAINT "pglease_leases_queue" PRIMARY KEY (task_name, ticket_id)
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE "pglease_leases_tickets" IS 'pglease: who queues for a lease, in the order of their numbers';
    ELSIF (SELECT count(*) FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = pg_catalog.to_regclass('"pglease_leases_tickets"') AND NOT a.attisdropped
             AND a.attname IN ('task_name', 'ticket_id', 'owner_id', 'number', 'expires_at')) <> 5 THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = 'the table pglease_leases_tickets is not ours; nothing was changed',
            HINT = 'choose another table_name or schema';
    END IF;
    IF pg_catalog.to_regclass('"pglease_leases_history"') IS NULL THEN
        CREATE TABLE "pglease_leases_history" (
            task_name     text COLLATE "C" NOT NULL,
            fencing_token bigint NOT NULL,
            owner_id      text NOT NULL,
            acquired_at   timestamptz NOT NULL,
            ended_at      timestamptz NOT NULL,
            ending        text NOT NULL,
            CONSTRAINT "pglease_leases_past" PRIMARY KEY (task_name, fencing_token)
        );
        COMMENT ON TABLE "pglease_leases_history" IS 'pglease: past holds, where any are kept';
    ELSIF (SELECT count(*) FROM pg_catalog.pg_attribute a
           WHERE a.attrelid = pg_catalog.to_regclass('"pglease_leases_history"') AND NOT a.attisdropped
             AND a.attname IN ('task_name', 'fencing_token', 'owner_id', 'acquired_at', 'ended_at', 'ending')) <> 6 THEN
        RAISE EXCEPTION USING ERRCODE = '55000',
            MESSAGE = 'the table pglease_leases_history is not ours; nothing was changed',
            HINT = 'choose another table_name or schema';
    END IF;
    SELECT m.token_floor INTO old_floor FROM "pglease_leases_meta" m;

    IF is_new OR is_published THEN
        -- A floor without its leases, or leases that lost their tokens: what was granted is not known any more, so new
        -- tokens start above all of it, in the next epoch (the upper half of a token). A first upgrade starts at 1 when
        -- old clients may still delete rows, so that a row that comes back does not repeat its token.
        new_floor := CASE WHEN old_floor IS NOT NULL THEN (least(old_floor >> 32, 2147483646) + 1) << 32
                          WHEN live > 0 THEN 1 ELSE 0 END;
    ELSIF old_floor IS NULL THEN
        SELECT (least(coalesce(max(l.fencing_token), 0) >> 32, 2147483646) + 1) << 32 INTO new_floor
        FROM "pglease_leases" l;
    ELSE
        new_floor := old_floor;
    END IF;
    BEGIN
        present_lineage := (
          SELECT pg_catalog.concat_ws('/', c.system_identifier,
            pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8),
            d.oid, '"pglease_leases"'::pg_catalog.regclass::pg_catalog.oid)
          FROM pg_catalog.pg_control_system() c, pg_catalog.pg_database d
          WHERE d.datname = pg_catalog.current_database());
    EXCEPTION WHEN OTHERS THEN
        present_lineage := NULL;  -- the server cannot tell, or not to this role
    END;
    INSERT INTO "pglease_leases_meta" AS m (version, protocol, token_floor, lineage)
        VALUES (1, 1, new_floor, present_lineage)
        -- Never lower: a cleanup beside us may have raised it since it was read.
        ON CONFLICT (one) DO UPDATE SET token_floor = greatest(m.token_floor, excluded.token_floor),
            lineage = CASE WHEN m.token_floor < excluded.token_floor THEN excluded.lineage ELSE m.lineage END,
            version = greatest(m.version, 1)
        WHERE m.token_floor < excluded.token_floor OR m.version < 1;

    IF is_published THEN
        ALTER TABLE "pglease_leases"
            ALTER COLUMN task_name TYPE text COLLATE "C",
            ALTER COLUMN owner_id TYPE text, ALTER COLUMN owner_id SET NOT NULL,
            ALTER COLUMN acquired_at SET NOT NULL,
            ALTER COLUMN expires_at SET NOT NULL,
            ALTER COLUMN heartbeat_at SET NOT NULL,
            ADD COLUMN IF NOT EXISTS lease_id uuid,
            ADD COLUMN fencing_token bigint,
            ADD COLUMN IF NOT EXISTS transitions bigint NOT NULL DEFAULT 0,
            ADD COLUMN IF NOT EXISTS metadata jsonb,
            ADD COLUMN IF NOT EXISTS waited_until timestamptz,
            ADD COLUMN IF NOT EXISTS queued_until timestamptz,
            ADD COLUMN IF NOT EXISTS slot timestamptz,
            ADD COLUMN IF NOT EXISTS session_pid integer,
            ADD COLUMN IF NOT EXISTS session_started timestamptz,
            SET (fillfactor = 50,
            autovacuum_vacuum_scale_factor = 0,
            autovacuum_vacuum_threshold = 1000,
            autovacuum_analyze_threshold = 1000,
            vacuum_truncate = off);
        -- Each row is the trace of one hold, so its token is the first. A hold that still runs keeps its end, under an
        -- id that nobody has, so that it is respected until then; one that is over is free.
        UPDATE "pglease_leases" SET fencing_token = greatest(new_floor, 1),
            lease_id = CASE WHEN expires_at > pg_catalog.clock_timestamp() THEN pg_catalog.gen_random_uuid() END;
        ALTER TABLE "pglease_leases" ALTER COLUMN fencing_token SET NOT NULL,
            ADD CONSTRAINT "pglease_leases_token_key" UNIQUE (task_name, fencing_token);
    END IF;
END
$pglease$;
"""

BACKWARD = """
-- Leases and their fencing tokens are gone after this: tokens start again at 1.
DROP TABLE IF EXISTS "pglease_leases_history";
DROP TABLE IF EXISTS "pglease_leases_tickets";
DROP TABLE IF EXISTS "pglease_leases_meta";
DROP TABLE IF EXISTS "pglease_leases";
"""


def upgrade() -> None:
    op.execute(FORWARD)


def downgrade() -> None:
    op.execute(BACKWARD)
