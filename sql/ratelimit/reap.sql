-- Housekeeping: removes limits of keys that have used nothing lately, from the page
-- $1 on; at which one to go on, NULL after the last.
SELECT r.next_page FROM /* schema */pgxlock_reap_limits($1::integer, 128) r
