-- Whether this is a place where advisory locks exclude somebody: takes the
-- session's own lock, $1, and looks whether the server knows of it; but not in
-- another backend than $2, which belongs to somebody else. Also how many locks the
-- server has room for, what the settings came to, and the two ends of the connection
-- as the server sees them, which for a Unix-domain socket are empty.
SELECT pg_catalog.pg_backend_pid(),
       CASE WHEN pg_catalog.pg_backend_pid() = $2::int
            THEN pg_catalog.pg_try_advisory_lock($1::bigint)
             AND EXISTS (SELECT FROM pg_catalog.pg_locks l
                          WHERE l.locktype = 'advisory' AND l.pid = pg_catalog.pg_backend_pid() AND l.granted AND l.objsubid = 1
                            AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                                               WHERE d.datname = pg_catalog.current_database())
                            AND (l.classid::bigint << 32) | l.objid::bigint = $1::bigint)
            ELSE false END,
       pg_catalog.current_setting('max_locks_per_transaction')::bigint
       * (pg_catalog.current_setting('max_connections')::bigint
          + pg_catalog.current_setting('max_prepared_transactions')::bigint),
       (SELECT s.setting::bigint FROM pg_catalog.pg_settings s WHERE s.name = 'idle_session_timeout'),
       coalesce(pg_catalog.host(pg_catalog.inet_client_addr()), ''), coalesce(pg_catalog.inet_client_port(), 0),
       coalesce(pg_catalog.host(pg_catalog.inet_server_addr()), ''), coalesce(pg_catalog.inet_server_port(), 0)
