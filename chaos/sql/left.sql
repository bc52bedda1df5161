-- What should not be there some time after the last worker has ended. Tickets of killed workers, which $1 names, last 15 s;
-- behind a pooler ($2 is false) sessions are the pooler's.
SELECT 'leases' AS what, count(*) AS n FROM distributed_locks WHERE expires_at > clock_timestamp()
UNION ALL
SELECT 'shares', count(*) FROM distributed_lock_shares WHERE expires_at > clock_timestamp()
UNION ALL
SELECT 'tickets', count(*) FROM pgxlock_waiters WHERE live_until > clock_timestamp() AND NOT split_part(owner, '.', 1) = ANY ($1::text[])
UNION ALL
SELECT 'advisory locks', count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION ALL
SELECT 'sessions', count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name NOT LIKE 'chaos%' AND $2
