-- Who keeps vacuum from removing old versions of rows, for how many transactions,
-- and for how many seconds (0: not known).
-- $1 seconds and $2 transactions that are too many
SELECT o.who, o.transactions::bigint, coalesce(o.seconds, 0)::bigint
  FROM (SELECT format('session %s, %s', a.pid, coalesce(nullif(a.application_name, ''), a.backend_type)) AS who,
               greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions,
               extract(epoch FROM clock_timestamp() - a.xact_start) AS seconds
          FROM pg_stat_activity a
         WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
           AND (a.datname = current_database() AND a.backend_type <> 'autovacuum worker' OR a.backend_type = 'walsender')
        UNION ALL
        SELECT format('replication slot %I', s.slot_name), age(s.xmin), NULL
          FROM pg_replication_slots s WHERE s.xmin IS NOT NULL
        UNION ALL
        SELECT format('prepared transaction %L', x.gid), age(x.transaction), extract(epoch FROM clock_timestamp() - x.prepared)
          FROM pg_prepared_xacts x WHERE x.database = current_database()) o
 WHERE o.seconds >= $1::double precision OR o.transactions >= $2::bigint
 ORDER BY o.transactions DESC LIMIT 5
