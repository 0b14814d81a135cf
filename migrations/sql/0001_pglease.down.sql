-- Leases and their fencing tokens are gone after this: tokens start again at 1.
DROP TABLE IF EXISTS "pglease_leases_history";
DROP TABLE IF EXISTS "pglease_leases_tickets";
DROP TABLE IF EXISTS "pglease_leases_meta";
DROP TABLE IF EXISTS "pglease_leases";
