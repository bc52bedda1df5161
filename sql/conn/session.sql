-- Makes a connection of our own fit for its work, whatever the role is set to;
-- only until the transaction ends if $1 is true.
-- search_path is still the role's, so that all is qualified.
SELECT pg_catalog.set_config('default_transaction_isolation', 'read committed', $1),
       pg_catalog.set_config('default_transaction_read_only', 'off', $1),
       pg_catalog.set_config('default_transaction_deferrable', 'off', $1),
       pg_catalog.set_config('synchronous_commit',
                             CASE WHEN pg_catalog.current_setting('synchronous_commit')
                                       OPERATOR(pg_catalog.=) ANY ('{off,local}'::pg_catalog.text[]) THEN 'on'
                                  ELSE pg_catalog.current_setting('synchronous_commit') END, $1),
       pg_catalog.set_config('statement_timeout', '5s', $1),
       pg_catalog.set_config('lock_timeout', '1500ms', $1),      -- less than our own patience: its error says more
       pg_catalog.set_config('idle_session_timeout', '0', $1),
       pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', $1),
       pg_catalog.set_config('client_min_messages', 'warning', $1),
       -- After a vacuum of the empty table the planner takes it for one row, and
       -- would read all of it for each entry of a batch. The one kind of scan that
       -- is left needs the name to look for.
       pg_catalog.set_config('enable_seqscan', 'off', $1),
       pg_catalog.set_config('enable_indexscan', 'off', $1),
       pg_catalog.set_config('enable_indexonlyscan', 'off', $1),
       pg_catalog.set_config('enable_bitmapscan', 'on', $1),
       pg_catalog.set_config('enable_nestloop', 'on', $1),
       -- Our statements are short: compiling one would take longer than all of it.
       pg_catalog.set_config('jit', 'off', $1),
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('transaction_timeout', '0', $1) END
