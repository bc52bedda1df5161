-- Takes an advisory lock of one number exclusively for the caller's transaction, and
-- waits for it: one row. No row, and nothing is locked: the server is a standby, or the
-- transaction keeps its snapshot; then tx/lock_all.sql is to be asked, which tells.
-- This is what is called most: each function named costs every call, and so does each
-- row that the server makes up.
-- $1 key
SELECT pg_catalog.pg_advisory_xact_lock($1::bigint)
 WHERE NOT pg_catalog.pg_is_in_recovery() AND pg_catalog.starts_with(pg_catalog.current_setting('transaction_isolation'), 'read ')
