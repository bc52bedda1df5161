-- Sends a notification that means nothing to the process that listens as $1.
SELECT pg_catalog.pg_notify(pg_catalog.concat('pgxlock_', $1::bigint), '')
