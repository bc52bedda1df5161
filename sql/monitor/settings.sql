-- Makes a transaction of the monitor fit for its work, whatever the role is set to.
-- search_path is still the role's, so that all is qualified. The settings
-- say what the files monitor_*.sql show, so that psql runs those files unchanged.
-- $1 pgxlock.key, $2 pgxlock.prefix, $3 pgxlock.states, $4 pgxlock.keys, $5 pgxlock.most
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('statement_timeout', '30s', true),
       pg_catalog.set_config('lock_timeout', '1500ms', true),
       pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('row_security', 'off', true),
       pg_catalog.set_config('pgxlock.key', $1::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.prefix', $2::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.states', $3::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.keys', coalesce($4::pg_catalog.text[]::pg_catalog.text, ''), true),
       pg_catalog.set_config('pgxlock.most', $5::pg_catalog.int8::pg_catalog.text, true)
