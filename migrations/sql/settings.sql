-- Makes a transaction fit for migrating, whatever the role is set to. No setting outlives
-- it: behind a pooler the next transaction may be somebody else's. search_path is still
-- the role's, so that all is qualified.
-- $1 schema, $2 whether down may remove what is in use, $3 whether all files run again, $4 the newest version
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('pgxlock.schema', $1::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.force', $2::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.again', $3::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.newest', $4::pg_catalog.text, true),
       pg_catalog.set_config('lock_timeout', '15s', true),
       pg_catalog.set_config('statement_timeout', '0', true),
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('transaction_timeout', '0', true) END
