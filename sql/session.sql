-- Makes a connection of our own fit for its work, whatever the role is set to.
-- search_path is still the role's, so that all is qualified.
SELECT pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       pg_catalog.set_config('default_transaction_read_only', 'off', false),
       pg_catalog.set_config('default_transaction_deferrable', 'off', false),
       pg_catalog.set_config('synchronous_commit', CASE WHEN pg_catalog.current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
                                                        ELSE pg_catalog.current_setting('synchronous_commit') END, false),
       pg_catalog.set_config('statement_timeout', '5s', false),
       pg_catalog.set_config('lock_timeout', '1500ms', false),      -- less than our own patience: its error says more
       pg_catalog.set_config('idle_session_timeout', '0', false),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', false),
       pg_catalog.set_config('client_min_messages', 'warning', false),
       -- Our statements are short: compiling one would take longer than all of it.
       pg_catalog.set_config('jit', 'off', false),
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('transaction_timeout', '0', false) END
