-- The cluster that the server belongs to, and its timeline, which grows with each promotion; 0 on a standby.
-- Not pg_control_checkpoint()'s, which is the old one from a promotion to the next checkpoint. A server may
-- refuse this to the role: then the cluster is not known.
SELECT s.system_identifier,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN 0::pg_catalog.int8
            ELSE pg_catalog.concat('x', pg_catalog.substr(
                   pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8))
                 ::pg_catalog.bit(32)::pg_catalog.int8 END
  FROM pg_catalog.pg_control_system() s
