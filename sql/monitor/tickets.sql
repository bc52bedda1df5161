-- Who waits in the queues of this package: a process with all that wait in it for one
-- lock. kind: 0 a lease; 1, 2 an advisory key of one or two integers. A process that
-- listens lives while its session has the advisory key that client is made of.
SELECT w.kind, w.name, w.ticket, coalesce(w.client, 0) AS client, w.owner, w.waiters, w.since, w.woken IS NOT NULL AS woken, w.holds
  FROM /* schema */pgxlock_waiters w
 WHERE w.live_until > clock_timestamp()
