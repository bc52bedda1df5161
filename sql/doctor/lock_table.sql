-- How many places of the lock table are taken.
SELECT count(*) FROM pg_locks l WHERE NOT l.fastpath
