-- Takes the advisory lock by which others know that this session listens as $1.
SELECT pg_catalog.pg_try_advisory_lock(/* schema */pgxlock_waiter_key($1::bigint))
