-- Forgets a run, so that it can be started again; false if there was none.
-- $1 key, $2 the beginning of its period, or its tick
SELECT /* schema */forget_run($1::pg_catalog.text, $2::pg_catalog.timestamptz)
