-- Makes a transaction of the monitor fit for its work, whatever the role is set to.
-- search_path is still the role's, so that all is qualified. The settings
-- say what the files beside this one show, so that psql runs those files unchanged.
-- $1 pgxlock.prefix, $2 pgxlock.states, $3 pgxlock.keys, $4 pgxlock.most
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
       pg_catalog.set_config('statement_timeout', '30s', true),
       pg_catalog.set_config('lock_timeout', '1500ms', true),
       pg_catalog.set_config('jit', 'off', true),
       pg_catalog.set_config('row_security', 'off', true),
       pg_catalog.set_config('pgxlock.prefix', $1::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.states', $2::pg_catalog.text, true),
       pg_catalog.set_config('pgxlock.keys', coalesce($3::pg_catalog.text[]::pg_catalog.text, ''), true),
       pg_catalog.set_config('pgxlock.most', $4::pg_catalog.int8::pg_catalog.text, true)
