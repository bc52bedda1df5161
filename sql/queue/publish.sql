-- Publishes the tickets of lines of waiters, and refreshes those that were published;
-- one row per entry, in order: its number, whether it is worth to ask for the lock
-- now, the hold by which it closes a circle of waits, if it is the one to give up, and
-- the ticket ahead of it, unless the lease is held.
-- $1 kinds, $2 names, $3 numbers (NULL: a new one), $4 how many wait, $5 what they hold
-- as JSON, $6 as whom their process listens, $7 its owner, $8 how long they count in
-- milliseconds, $9 the protocol
SELECT t.ticket, t.ask, t.deadlock, t.behind
  FROM /* schema */pgxlock_publish_batch($1::integer[], $2::text[], $3::bigint[], $4::integer[], $5::text[], $6::bigint,
                                         $7::text, $8::bigint, $9::integer)
       WITH ORDINALITY AS t (ticket, ask, deadlock, behind, n)
 ORDER BY t.n
