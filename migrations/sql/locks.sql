-- Waits for golang-migrate's command, which holds the first lock in a session, and for a
-- file that somebody runs without it: they take the second.
-- $1 the key that golang-migrate makes
SELECT pg_advisory_xact_lock($1::bigint),
       pg_advisory_xact_lock(('x706c6a' || encode(substr(sha256(decode('00', 'hex') || convert_to('migrate', 'UTF8')
         || decode('00', 'hex') || convert_to(current_setting('pgxlock.schema'), 'UTF8')), 1, 5), 'hex'))::bit(64)::bigint)
