-- NULL if the server keeps advisory locks: it takes one until the transaction ends, and looks whether
-- the server knows of it. Otherwise what the server says that it is. NULL as well if another
-- session has the lock, $1, which is a random number.
SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock($1::pg_catalog.int8) THEN
         (SELECT pg_catalog.version()
           WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_locks l
                              WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory'
                                AND l.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()
                                AND l.granted AND l.objsubid OPERATOR(pg_catalog.=) 1::pg_catalog.int2
                                AND (l.classid::pg_catalog.int8 OPERATOR(pg_catalog.<<) 32)
                                    OPERATOR(pg_catalog.|) l.objid::pg_catalog.int8
                                    OPERATOR(pg_catalog.=) $1::pg_catalog.int8)) END
