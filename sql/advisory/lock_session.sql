-- Makes the connection that holds advisory locks fit for it, whatever the role is
-- set to. $1 is the locks' TTL in milliseconds: when the client has been silent for
-- that long, or is cut off, the server ends the session, and with it the locks; 0
-- for never. search_path is still the role's until then, so that all is qualified.
-- $2 is the backend: in another one, which belongs to somebody else, nothing is set,
-- and no row comes.
SELECT pg_catalog.set_config('default_transaction_isolation', 'read committed', false),
       pg_catalog.set_config('default_transaction_read_only', 'off', false),
       pg_catalog.set_config('default_transaction_deferrable', 'off', false),
       pg_catalog.set_config('client_min_messages', 'warning', false),
       pg_catalog.set_config('jit', 'off', false),
       pg_catalog.set_config('plan_cache_mode', 'force_generic_plan', false),
       -- As in session.sql, for the rows that locks with tokens have.
       pg_catalog.set_config('enable_seqscan', 'off', false),
       pg_catalog.set_config('enable_indexscan', 'off', false),
       pg_catalog.set_config('enable_indexonlyscan', 'off', false),
       pg_catalog.set_config('enable_bitmapscan', 'on', false),
       pg_catalog.set_config('enable_nestloop', 'on', false),
       -- The TTL does not run during a statement. Ours wait for nothing: this is for a
       -- server that is very slow, and one that is cancelled costs more than the wait.
       pg_catalog.set_config('statement_timeout', '5s', false),
       pg_catalog.set_config('lock_timeout', '500ms', false),    -- less: its error says more
       -- What ends the session ends the locks, so that nothing may be shorter than
       -- the TTL: until then the client may believe in them.
       pg_catalog.set_config('idle_session_timeout', $1::pg_catalog.int4::pg_catalog.text, false),
       pg_catalog.set_config('idle_in_transaction_session_timeout', $1::pg_catalog.text, false),
       CASE WHEN pg_catalog.current_setting('transaction_timeout', true) IS NOT NULL
            THEN pg_catalog.set_config('transaction_timeout', $1::pg_catalog.text, false) END,
       -- Only TCP ends what waits for the rest of a group of messages, before 17, or
       -- for room to reply. With tcp_user_timeout the kernel counts no probes; where
       -- the server's has none, the probes end at the TTL. It takes at most 32767 s.
       CASE WHEN $1 OPERATOR(pg_catalog.>) 0 THEN pg_catalog.concat(
            pg_catalog.set_config('tcp_user_timeout', $1::pg_catalog.text, false),
            pg_catalog.set_config('tcp_keepalives_idle', LEAST(GREATEST(
                 pg_catalog.int4div($1 OPERATOR(pg_catalog.-) 1, 1000) OPERATOR(pg_catalog.-) 1, 1),
                 32767)::pg_catalog.text, false),
            pg_catalog.set_config('tcp_keepalives_interval', '1', false),
            pg_catalog.set_config('tcp_keepalives_count', '2', false)) END,
       -- From here on nothing is found but by its full name.
       pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)
 WHERE pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $2::pg_catalog.int4
