-- Makes a connection of our own fit for its work, whatever the role is set to.
SELECT set_config('search_path', 'pg_catalog, pg_temp', false),
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('default_transaction_read_only', 'off', false),
       set_config('default_transaction_deferrable', 'off', false),
       set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
                                             ELSE current_setting('synchronous_commit') END, false),
       set_config('statement_timeout', '5s', false),
       set_config('lock_timeout', '2s', false),
       set_config('idle_session_timeout', '0', false),
       set_config('idle_in_transaction_session_timeout', '5s', false),
       set_config('client_min_messages', 'warning', false),
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL THEN set_config('transaction_timeout', '0', false) END
