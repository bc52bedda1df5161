-- Makes a new session fit for migrating, whatever the role is set to. From here
-- on search_path names one schema only, so that nobody's objects come before
-- those of pg_catalog.
-- $1 schema ('' = the first of search_path), $2 whether down may remove live leases
SELECT pg_catalog.set_config('pgxlock.search_path', CASE WHEN $1::pg_catalog.text OPERATOR(pg_catalog.<>) '' THEN pg_catalog.format('%I', $1::pg_catalog.text)
                             ELSE pg_catalog.current_setting('search_path') END, false),
       pg_catalog.set_config('search_path', pg_catalog.format('%I', CASE WHEN $1::pg_catalog.text OPERATOR(pg_catalog.<>) '' THEN $1::pg_catalog.text
                             ELSE coalesce(pg_catalog.current_schema()::pg_catalog.text, '') END), false),
       pg_catalog.set_config('pgxlock.schema', $1::pg_catalog.text, false),
       pg_catalog.set_config('pgxlock.force', CASE WHEN $2::boolean THEN 'on' ELSE 'off' END, false),
       pg_catalog.set_config('lock_timeout', '15s', false),
       pg_catalog.set_config('statement_timeout', '0', false),
       pg_catalog.set_config('idle_session_timeout', '0', false),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '0', false),
       pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       pg_catalog.set_config('default_transaction_read_only', 'off', false)
