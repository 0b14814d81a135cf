-- acquire, renew, release; a new epoch after a failover
GRANT SELECT, INSERT, UPDATE ON "pglease_leases" TO "pglease_app";
GRANT SELECT, UPDATE (token_floor, lineage, quarantined_until) ON "pglease_leases_meta" TO "pglease_app";
GRANT SELECT, INSERT, UPDATE, DELETE ON "pglease_leases_tickets" TO "pglease_app";
GRANT SELECT, INSERT, DELETE ON "pglease_leases_history" TO "pglease_app";

-- guard other tables inside its own transactions
GRANT SELECT, UPDATE (heartbeat_at) ON "pglease_leases" TO "pglease_guard";

-- cleanup_expired
GRANT SELECT, DELETE, UPDATE (heartbeat_at) ON "pglease_leases" TO "pglease_cleanup";
GRANT SELECT, UPDATE (token_floor) ON "pglease_leases_meta" TO "pglease_cleanup";
GRANT SELECT, DELETE ON "pglease_leases_tickets" TO "pglease_cleanup";
GRANT SELECT, DELETE ON "pglease_leases_history" TO "pglease_cleanup";

-- look
GRANT SELECT ON "pglease_leases" TO "pglease_read";
GRANT SELECT ON "pglease_leases_meta" TO "pglease_read";
GRANT SELECT ON "pglease_leases_tickets" TO "pglease_read";
GRANT SELECT ON "pglease_leases_history" TO "pglease_read";
