-- Makes a new session fit for migrating, whatever the role is set to.
-- $1 schema ('' = as search_path says), $2 whether down may remove live leases
SELECT CASE WHEN $1::text <> '' THEN set_config('search_path', pg_catalog.format('%I', $1::text), false) END,
       set_config('pgxlock.schema', $1::text, false),
       set_config('pgxlock.force', CASE WHEN $2::boolean THEN 'on' ELSE 'off' END, false),
       set_config('lock_timeout', '15s', false),
       set_config('statement_timeout', '0', false),
       set_config('idle_session_timeout', '0', false),
       set_config('idle_in_transaction_session_timeout', '0', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false)
